"""The streaming inference server around `model`."""
