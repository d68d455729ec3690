"""Qwen3.5 and Qwen3.6 as published, dense and text alone: gated delta net and gated attention."""
