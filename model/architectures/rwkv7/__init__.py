"""RWKV-7 "Goose" as published (World, G1): Peng et al. 2025, arXiv 2503.14456."""
