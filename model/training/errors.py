"""The errors of training, for commands that need no torch."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """A run that cannot continue: the loss is not finite, or the folder holds another run."""
