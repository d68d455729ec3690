"""ARWKV: RWKV-7's time mix in the body of Qwen2.5."""
