"""Granite, Nemotron-H and Falcon-H1: Mamba-2 and attention, in turn or together."""
