"""What a client may know of the model that is served."""

from __future__ import annotations

from dataclasses import dataclass


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
    created_s: int
    bos_token_id: int = 0
    hidden_size: int = 0
