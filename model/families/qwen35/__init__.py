"""Qwen3.5 and Qwen3.6, dense, text alone: gated delta rule and attention in turn."""
