"""A tuned state of RWKV-7: the tensors ``blocks.I.att.time_state`` [H, N, N] of state tuning.

State tuning trains what the time mix of each layer begins with, and leaves the weights as they
are. The file has that matrix alone; the token shifts begin with zeros. For RWKV-7 it is the
kernel's own initial state, with values as rows and keys as columns, so S_ours[key, value] is its
transpose. RWKV-PEFT writes it so since the sixth of February 2025; its versions of the two days
before, and programs that give the matrix to flash-linear-attention as it is, have keys as rows.
(Programs for RWKV-5 and RWKV-6 transpose the file's matrix when they load it.)

RWKV-PEFT can also write such a state into the file of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from model.families.rwkv7.config import Rwkv7Config
from model.weights import Array, CheckpointError, shape_in

KEY, END = "blocks.{}.att.time_state", ".att.time_state"


def merged_states(files: Mapping[str, Array]) -> dict[str, Array]:
    """The matrices that are in a file of weights, where a tuned state was merged into it."""
    return {key: files[key] for key in files if key.endswith(END)}


def time_states(layers: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The matrices of a published file for each layer's S [H, N, N] as [key, value]."""
    return {
        KEY.format(layer): np.ascontiguousarray(tensors["S"].transpose(0, 2, 1))
        for layer, tensors in enumerate(layers)
    }


def read_time_states(
    files: Mapping[str, Array], name: str, config: Rwkv7Config
) -> list[dict[str, Array]]:
    """Each layer's S [H, N, N] as [key, value], float32, out of a file called ``name``.

    Raises `CheckpointError` where it is a state of a model of another shape.
    """
    heads, dim = config.num_attention_heads, config.head_dim
    wanted = {KEY.format(layer) for layer in range(config.num_hidden_layers)}
    found = {key for key in files if key.endswith(END)}
    if not found:
        raise CheckpointError(f"{name} is not a tuned state: it has no key {KEY.format(0)!r}")
    if left := sorted(set(files) - found):
        raise CheckpointError(f"{name} has an unknown key {left[0]!r} ({len(left)} in all)")
    if found != wanted:
        raise CheckpointError(
            f"{name} is a state of {len(found)} layers, and the model has {len(wanted)}"
        )
    for key in sorted(wanted):
        shape = shape_in(files, key)
        if shape != (heads, dim, dim):
            raise CheckpointError(
                f"{name}: {key} is {list(shape)}, and the model has {[heads, dim, dim]}"
            )
    return [
        {"S": np.asarray(files[KEY.format(layer)], np.float32).transpose(0, 2, 1)}
        for layer in range(config.num_hidden_layers)
    ]
