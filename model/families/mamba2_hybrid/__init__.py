"""Granite 4.0-H: Mamba-2 and attention in turn."""
