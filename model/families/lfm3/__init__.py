"""LFM3: LFM2 with windows of attention, gates of heads, and norms after mixers and MLPs."""
