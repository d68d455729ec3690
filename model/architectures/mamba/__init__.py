"""Mamba-1, Falcon-Mamba and Falcon3-Mamba as published: Gu and Dao 2023, arXiv 2312.00752."""
