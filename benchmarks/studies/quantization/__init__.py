"""Precisions of models trained here, and llama.cpp's of the same weights."""
