"""What replay.cpp reads: a model's options, state layout and weights, and tokens to feed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from model.architectures.config import Config
from model.native.options import native_options
from model.state import StateLayout


def record(
    path: Path,
    config: Config,
    weights: Mapping[str, npt.NDArray[np.float32]],
    tokens: Sequence[int],
) -> None:
    """Words apart by blanks; a weight's numbers follow its shape as float32, little endian."""
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
        file.write("".join(f"token {token}\n" for token in tokens).encode())
