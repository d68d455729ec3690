"""Jamba, dense: Mamba-1 and attention in turn."""
