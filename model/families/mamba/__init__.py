"""Mamba-1, Falcon-Mamba and Mamba-2."""
