"""The weights of a Mamba model by the keys, and with the axes, of its published files; no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from model.architectures.mamba.config import MambaConfig
from model.architectures.mamba2.config import Mamba2Config
from model.checkpoint import Checkpoint
from model.foreign.mamba_names import MambaNames
from model.tensor_spec import Shape
from model.weights import Array

MambaFamily = MambaConfig | Mamba2Config


def config_of(checkpoint: Checkpoint) -> MambaFamily:
    """The config, which is of one of the two families."""
    assert isinstance(checkpoint.config, MambaFamily), checkpoint.config
    return checkpoint.config


def published(
    checkpoint: Checkpoint, names: MambaNames, shape_of: Callable[[str, Shape], Shape]
) -> Iterator[tuple[str, Array]]:
    """The tensors by the keys of ``names``, float32, each read when it is its turn.

    ``shape_of`` has the shape in the file, by our name and shape.
    """
    for ours, part in names.parts_of(config_of(checkpoint)).items():
        tensor = np.asarray(checkpoint.weights[ours], np.float32)
        if part.form == "log_negative":
            tensor = -np.exp(tensor)
        yield part.keys[0], tensor.reshape(shape_of(ours, tensor.shape))
