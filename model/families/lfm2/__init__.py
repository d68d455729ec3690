"""The family lfm2: its config, its network, and its published files."""
