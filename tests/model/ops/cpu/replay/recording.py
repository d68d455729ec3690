"""What replay.cpp reads: a model's options, state layout and weights, and texts to feed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from model.architectures.config import Config
from model.native.options import native_options
from model.native.runtime import HELD_KINDS, held_as
from model.state import StateLayout
from model.weights import StoredWeights


def record(
    path: Path,
    config: Config,
    weights: Mapping[str, npt.NDArray[np.float32]],
    texts: Sequence[Sequence[int]],
) -> None:
    """Words apart by blanks; a weight's numbers follow its shape as float32, little endian.

    Then, of a matrix, what int4 holds it in, the length of its blocks, and these. The texts are
    those of one batch.
    """
    layout = StateLayout.of(config)
    with path.open("wb") as file:
        for name, value in native_options(config, layout).items():
            kind, text = ("name", value) if isinstance(value, str) else ("number", float(value))
            file.write(f"{kind} {name} {text}\n".encode())
        for field in layout.fields:
            file.write(f"offset {field.layer} {field.name} {field.offset}\n".encode())
        for name, weight in weights.items():
            shape = " ".join(map(str, weight.shape))
            file.write(f"weight {name} {weight.ndim} {shape}\n".encode())
            file.write(np.ascontiguousarray(weight, "<f4").tobytes())
            if weight.ndim == 2:
                held = held_as(weights, name)
                blocks = blocks_of(weights, name) if held in HELD_KINDS else b""
                file.write(f"held {name} {held} {len(blocks)}\n".encode() + blocks)
        for text in texts:
            file.write(f"text {len(text)} {' '.join(map(str, text))}\n".encode())


def blocks_of(weights: Mapping[str, npt.NDArray[np.float32]], name: str) -> bytes:
    assert isinstance(weights, StoredWeights)
    return weights.blocks(name, 0, None).tobytes()
