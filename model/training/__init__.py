"""Text to a trained checkpoint, and the bits per byte of any checkpoint."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """A run that cannot continue: the loss is not finite, or the folder holds another run."""
