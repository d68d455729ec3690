"""What a request may ask of the draws: the ranges of its parameters, whoever draws."""

from __future__ import annotations

from server.engine.errors import InvalidRequest
from server.engine.types import SamplingParams

#: How many last tokens of a session, fed and generated, the penalties look at.
PENALTY_WINDOW = 256

MAX_SEED = (1 << 64) - 1


def has_penalty(params: SamplingParams) -> bool:
    """Whether a draw depends on the session's recent tokens."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0)


def has_filter(params: SamplingParams) -> bool:
    """Whether some tokens cannot be drawn however the number falls."""
    return (params.top_k, params.top_p, params.min_p) != (0, 1.0, 0.0)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises `InvalidRequest` that names the first field out of range."""
    for ok, field, rule in (
        (
            params.temperature == 0.0 or 0.01 <= params.temperature <= 100.0,
            "temperature",
            "must be 0 (greedy) or in 0.01..100",
        ),
        (0 <= params.top_k <= vocab_size, "top_k", f"must be in 0..{vocab_size}"),
        (0.0 < params.top_p <= 1.0, "top_p", "must be above 0 and at most 1"),
        (0.0 <= params.min_p <= 1.0, "min_p", "must be in 0..1"),
        (
            0.01 <= params.repetition_penalty <= 100.0,
            "repetition_penalty",
            "must be in 0.01..100",
        ),
        (-2.0 <= params.presence_penalty <= 2.0, "presence_penalty", "must be in -2..2"),
        (-2.0 <= params.frequency_penalty <= 2.0, "frequency_penalty", "must be in -2..2"),
        (0 <= params.seed <= MAX_SEED, "seed", "must be in 0..2**64-1"),
        (params.max_tokens >= 1, "max_tokens", "must be at least 1"),
        (all(params.stop), "stop", "must not hold an empty string"),
        (
            all(0 <= id < vocab_size for id in params.stop_token_ids),
            "stop_token_ids",
            f"must be in 0..{vocab_size - 1}",
        ),
    ):
        if not ok:
            raise InvalidRequest(f"{field}: {rule}", field)
