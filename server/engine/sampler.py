"""Draws the next token of each row from its logits, reproducibly.

Order: repetition penalty, presence and frequency penalty, temperature, then
top-k, top-p and min-p, each of which keeps a prefix of the tokens sorted by
probability (equals by id); the shortest prefix wins. The draw walks the kept
tokens in the order of their ids to a number in [0, 1), times their mass, that is
a function of (seed, position) alone: it does not depend on what else is in the
batch or on what was drawn before. `model/ops/cpu/src/sampler.cpp` draws alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.engine.runner import NOT_FINITE
from server.engine.sampling import has_filter, has_penalty
from server.engine.types import SamplingParams

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row's draw depends on, beside its logits. ``recent`` is for the penalties."""

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


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token per row of ``logits`` [B, vocabulary]; `NOT_FINITE` where a row is not.

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
    return [token if ok else NOT_FINITE for token, ok in zip(tokens, finite, strict=True)]


def log_probabilities(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """The natural logarithm of the probability of each row's token, by ``logits`` [B, vocabulary].

    NaN where a row is not finite.
    """
    assert len(logits) == len(tokens), (logits.shape, len(tokens))
    logits = logits.float()
    found = logits.log_softmax(dim=-1)[torch.arange(len(tokens)), list(tokens)]
    found[~logits.isfinite().all(dim=-1)] = torch.nan
    values: list[float] = found.tolist()
    return values


def _penalized(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Lowers the logits of recent tokens, or raises them where a penalty rewards.

    First positive ones are divided and negative ones multiplied (CTRL, section
    4.1); then each loses ``presence + frequency * count``, as at OpenAI.
    """
    rows = [i for i, d in enumerate(draws) if d.recent and has_penalty(d.params)]
    if not rows:
        return logits
    logits = logits.clone()
    for i in rows:
        params = draws[i].params
        seen, counts = torch.tensor(draws[i].recent).unique(return_counts=True)
        values, penalty = logits[i, seen], params.repetition_penalty
        values = torch.where(values > 0, values / penalty, values * penalty)
        logits[i, seen] = values - (params.presence_penalty + params.frequency_penalty * counts)
    return logits


def _draw(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Tokens of rows with a temperature above 0."""
    temperature = torch.tensor([d.params.temperature for d in draws], dtype=torch.float32)
    p = torch.softmax(logits / temperature.unsqueeze(1), dim=-1)
    kept = p.double()
    for row, d in enumerate(draws):
        if has_filter(d.params):
            kept[row].masked_fill_(~_kept(p[row], d.params), 0.0)
    cumulative = kept.cumsum(dim=-1)
    u = torch.tensor([uniform(d.params.seed, d.position) for d in draws], dtype=torch.float64)
    wanted = u.unsqueeze(1) * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, wanted, right=True).squeeze(1)
    # Rounding may put the number at the very end: the last token that is kept.
    last = kept.shape[1] - 1 - (kept.flip(1) > 0).int().argmax(dim=1)
    tokens: list[int] = torch.minimum(found, last).tolist()
    return tokens


def _kept(p: Tensor, params: SamplingParams) -> Tensor:
    """Which tokens the filters keep of the probabilities ``p`` [vocabulary], as booleans."""
    ordered, order = p.sort(descending=True, stable=True)
    count = len(p)
    if params.top_k > 0:
        count = min(count, params.top_k)
    if params.top_p < 1.0:
        # The token that reaches top_p is the last one kept.
        reached = torch.searchsorted(ordered.double().cumsum(dim=-1), params.top_p)
        count = min(count, int(reached) + 1)
    if params.min_p > 0.0:
        count = min(count, int((ordered >= params.min_p * ordered[0]).sum()))
    return torch.zeros_like(p, dtype=torch.bool).index_fill_(0, order[:count], True)
