"""The family qwen35: its config, its network, and its published files."""
