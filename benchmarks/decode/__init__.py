"""Tokens/s of decoding and prefill, compared with llama.cpp, transformers and PyTorch."""
