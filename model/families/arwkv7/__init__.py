"""The family arwkv7: its config, its network, and its published files."""
