"""Files of rwkv.cpp, as its ``python/convert_pytorch_to_ggml.py`` writes them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tests.rwkv7 import Published, Shape

MAGIC, VERSION = 0x67676D66, 101
F32, F16 = 0, 1
Named = dict[str, npt.NDArray[np.float32]]


def rwkv_cpp_tensors(weights: Published) -> Named:
    """The tensors of a native file by their names there, in numpy's order of axes."""
    tensors: Named = {}
    for key, tensor in weights.items():
        block, _, name = key.rpartition(".att.")
        if name.startswith("x_"):
            mixes = [weights[f"{block}.att.x_{letter}"] for letter in "rwkvag"]
            tensors[f"{block}.att.x_rwkvag"] = torch.cat(mixes).numpy()
        elif name in ("w1", "w2", "a1", "a2", "g1", "g2", "v1", "v2"):
            tensors[key] = tensor.T.numpy()
        else:
            tensors[key] = tensor.numpy()
    return tensors


def write_rwkv_cpp(path: Path, shape: Shape, tensors: Named, is_half: bool = False) -> Path:
    """Matrices are of 16 bits where ``is_half``."""
    layers = 1 + max(int(key.split(".")[1]) for key in tensors if key.startswith("blocks."))
    sizes = shape.vocab_size, shape.width, layers
    parts = [struct.pack("<6I", MAGIC, VERSION, *sizes, F16 if is_half else F32)]
    for key, tensor in tensors.items():
        narrow = is_half and key.endswith(".weight") and tensor.ndim == 2
        kind, dtype = (F16, "<f2") if narrow else (F32, "<f4")
        axes = tensor.shape[::-1]
        parts.append(struct.pack(f"<3I{len(axes)}I", len(axes), len(key), kind, *axes))
        parts += [key.encode(), tensor.astype(dtype).tobytes()]
    path.write_bytes(b"".join(parts))
    return path
