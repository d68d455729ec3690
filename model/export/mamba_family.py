"""The families of Mamba, which are exported alike; no torch."""

from __future__ import annotations

from model.checkpoint import Checkpoint
from model.families.mamba.config import Mamba2Config, MambaConfig

MambaFamily = MambaConfig | Mamba2Config


def config_of(checkpoint: Checkpoint) -> MambaFamily:
    """The config, which is of one of the two families."""
    assert isinstance(checkpoint.config, MambaFamily), checkpoint.config
    return checkpoint.config
