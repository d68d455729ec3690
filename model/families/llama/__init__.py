"""The family llama: its config, its network, and its published files."""
