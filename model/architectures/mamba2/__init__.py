"""Mamba-2 as published (state-spaces, Codestral): Dao and Gu 2024, arXiv 2405.21060."""
