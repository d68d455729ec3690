"""Llama, and what differs from it by little: Qwen2, Qwen3 and SmolLM3, dense and text alone."""
