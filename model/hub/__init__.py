"""Checkpoints from the Hugging Face hub: named ``OWNER/NAME``, downloaded once, used from disk."""
