"""What a client may know of the model that is served."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from model.state import StateLayout


@dataclass(frozen=True, slots=True)
class StateTensorInfo:
    """A tensor that each of ``layers`` layers has in a session's state; ``bytes`` of all of them.

    ``shape`` is that of one layer: see `model.attention.state_specs`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layers: int
    bytes: int


def state_tensors(layout: StateLayout) -> tuple[StateTensorInfo, ...]:
    """What a session's state consists of, in the order of the layers."""
    layers = Counter((field.name, field.spec) for field in layout.fields)
    return tuple(
        StateTensorInfo(name, spec.shape, spec.dtype, count, spec.num_bytes * count)
        for (name, spec), count in layers.items()
    )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One entry of `/v1/models`.

    A session has ``fixed_state_bytes``, and where the model has attention layers
    ``state_bytes_per_token`` more for each of the ``context`` positions that these keep, 0 where
    there are none; ``past`` says what happens at that bound, None where there is none.
    ``kv_cache_bytes_per_token`` is what a softmax model of the same shape would
    cache for every token, in 16 bits: see `model.state.kv_cache_bytes_per_token`.
    ``created_s`` is a Unix time, ``bos_token_id`` begins every text,
    ``hidden_size`` is the number of values of an embedding.
    """

    name: str
    digest: str
    attention: str
    dtype: str
    parameters: int
    vocab_size: int
    state_bytes_per_session: int
    fixed_state_bytes: int
    state_bytes_per_token: int
    context: int
    past: str | None
    kv_cache_bytes_per_token: int
    max_sessions: int
    state: tuple[StateTensorInfo, ...]
    created_s: int
    bos_token_id: int = 0
    hidden_size: int = 0
