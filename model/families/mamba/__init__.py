"""The family mamba: its config, its network, and its published files."""
