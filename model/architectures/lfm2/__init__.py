"""LFM2 and LFM2.5 as published, dense and text alone: gated short convolutions and attention."""
