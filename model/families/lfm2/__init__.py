"""LFM2 and LFM2.5, dense: short convolutions and attention."""
