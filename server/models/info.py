"""What a client may know of the model that is served."""

from __future__ import annotations

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
    """What a session's state consists of, in the order of the first layer."""
    first = (field for field in layout.fields if field.layer == 0)
    return tuple(
        StateTensorInfo(
            field.name,
            field.spec.shape,
            field.spec.dtype,
            layout.num_layers,
            field.spec.num_bytes * layout.num_layers,
        )
        for field in first
    )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One entry of `/v1/models`.

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
    kv_cache_bytes_per_token: int
    max_sessions: int
    state: tuple[StateTensorInfo, ...]
    created_s: int
    bos_token_id: int = 0
    hidden_size: int = 0
