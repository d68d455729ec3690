"""Text to a trained checkpoint, and the bits per byte of any checkpoint."""
