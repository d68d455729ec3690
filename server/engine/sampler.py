"""Draws the next token of each row from its logits, reproducibly.

Order: repetition penalty, temperature, then top-k, top-p and min-p, each of
which keeps a prefix of the tokens sorted by probability; the shortest prefix
wins. The draw inverts the cumulative distribution at a number in [0, 1) that is
a function of (seed, position) alone, so it does not depend on what else is in
the batch or on what was drawn before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.engine.errors import InvalidRequest
from server.engine.types import SamplingParams

#: How many last tokens of a session the repetition penalty looks at.
PENALTY_WINDOW = 256
#: Sorted probabilities looked at first; a row that needs more is sorted whole.
_SHORT = 256
_MASK = (1 << 64) - 1


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
        (0 <= params.seed <= _MASK, "seed", "must be in 0..2**64-1"),
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


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row's draw depends on, beside its logits. ``recent`` is for the penalty."""

    params: SamplingParams
    position: int
    recent: Sequence[int]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position): two rounds of SplitMix64 (Steele et al. 2014)."""
    x = _split_mix(_split_mix(seed & _MASK) ^ position)
    return (x >> 11) * 2.0**-53


def _split_mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """One token per row of ``logits`` [B, vocabulary]; None where a row is not finite.

    ``logits`` is not changed.
    """
    assert len(logits) == len(draws), (logits.shape, len(draws))
    logits = logits.float()
    logits = _penalized(logits, draws)
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    finite: list[bool] = logits.isfinite().all(dim=-1).tolist()
    random = [i for i, d in enumerate(draws) if d.params.temperature > 0.0 and finite[i]]
    if random:
        chosen = _draw(logits[random], [draws[i] for i in random])
        for i, token in zip(random, chosen, strict=True):
            tokens[i] = token
    return [token if ok else None for token, ok in zip(tokens, finite, strict=True)]


def _penalized(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Divides positive and multiplies negative logits of recent tokens (CTRL, section 4.1)."""
    rows = [i for i, d in enumerate(draws) if d.params.repetition_penalty != 1.0 and d.recent]
    if not rows:
        return logits
    logits = logits.clone()
    for i in rows:
        penalty, seen = (
            draws[i].params.repetition_penalty,
            torch.tensor(sorted(set(draws[i].recent))),
        )
        values = logits[i, seen]
        logits[i, seen] = torch.where(values > 0, values / penalty, values * penalty)
    return logits


def _draw(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Tokens of rows with a temperature above 0."""
    temperature = torch.tensor([d.params.temperature for d in draws], dtype=torch.float32)
    p = torch.softmax(logits / temperature.unsqueeze(1), dim=-1)
    short, order = p.topk(min(_SHORT, p.shape[1]), dim=-1)
    tokens: list[int] = []
    for row, (d, cumulative) in enumerate(zip(draws, short.double().cumsum(dim=-1), strict=True)):
        index = _index(short[row], cumulative, d, whole=False)
        if index is None:
            whole, where = p[row].sort(descending=True, stable=True)
            index = _index(whole, whole.double().cumsum(dim=-1), d, whole=True)
            assert index is not None
            tokens.append(int(where[index]))
        else:
            tokens.append(int(order[row, index]))
    return tokens


def _index(p: Tensor, cumulative: Tensor, draw: Draw, whole: bool) -> int | None:
    """Where in the sorted probabilities the draw falls; None if ``p`` is too short to say."""
    params, size = draw.params, len(p)
    mass = cumulative[-1].item() if whole else 1.0
    kept = size if whole else None
    if 0 < params.top_k <= size:
        kept = params.top_k
    if params.top_p < 1.0:
        # The token that reaches top_p is the last one kept.
        reached = int(torch.searchsorted(cumulative, params.top_p * mass)) + 1
        if reached <= size:
            kept = reached if kept is None else min(kept, reached)
    if params.min_p > 0.0:
        above = int((p >= params.min_p * p[0]).sum())
        if above < size or whole:
            kept = above if kept is None else min(kept, above)
    if kept is not None:
        mass = cumulative[kept - 1].item()
    wanted = uniform(params.seed, draw.position) * mass
    index = int(torch.searchsorted(cumulative, wanted, right=True))
    if kept is not None:
        return min(index, kept - 1)
    # All tokens are kept, and the draw can fall beyond the sorted ones.
    unrestricted = params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0
    return index if unrestricted and index < size else None
