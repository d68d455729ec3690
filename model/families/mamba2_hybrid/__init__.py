"""Granite 4.0-H, Nemotron-H and Falcon-H1: Mamba-2 and attention, in turn or together."""
