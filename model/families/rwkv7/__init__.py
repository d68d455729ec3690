"""The family rwkv7: its config, its network, and its published files."""
