"""Llama, Qwen2, Qwen3, SmolLM3: with a bounded past, or with a state of constant size."""
