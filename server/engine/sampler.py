"""Draws the next token of each row from its logits, reproducibly.

Order: logit bias; repetition penalty, then presence and frequency penalty; the
mask of what is allowed; temperature; top-k, top-p and min-p, each of which keeps
a prefix of the tokens sorted by probability (equals by id), so that their order
does not matter: the shortest prefix wins; and last typical-p, of what these have
left. Greedy, at temperature 0 or top-p 0, takes the largest after the mask. The draw walks
the kept tokens in the order of their ids to a number in [0, 1), times their
mass, that is a function of (seed, position) alone: it does not depend on what
else is in the batch or on what was drawn before.
`model/ops/cpu/src/sampler.cpp` draws alike.

- ``logit_bias``: added to the logits, as at OpenAI.
- ``repetition_penalty``: Keskar et al. 2019, CTRL, section 4.1.
- ``presence_penalty``, ``frequency_penalty``: OpenAI's.
- ``top_k``: Fan et al. 2018, section 5.4; ``top_p``: Holtzman et al. 2020, section
  3.1; ``min_p``: Nguyen et al. 2024, section 3.
- ``typical_p``: Meister et al. 2022, Locally Typical Sampling, section 4: of the
  distribution that is left, the tokens of which the information -log p is nearest
  to the entropy H, as many as reach a mass of ``typical_p`` together. It can drop
  the most likely token, for which reason it is last: a prefix taken of what it
  keeps, or an intersection with one, could be another or empty.

Log-probabilities are of the logits before all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from server.engine.runner import NOT_FINITE, TokenScore
from server.engine.sampling import has_filter, has_penalty, is_greedy
from server.engine.types import SamplingParams

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row's draw depends on, besides its logits.

    ``recent`` is for the penalties; ``allowed`` as in `server.engine.runner.Feed`.
    """

    params: SamplingParams
    position: int
    recent: Sequence[int]
    allowed: npt.NDArray[np.uint32] | None = None


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
    logits = _penalized(_biased(logits.float(), draws), draws)
    finite: list[bool] = logits.isfinite().all(dim=-1).tolist()
    logits = _masked(logits, draws)
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    random = [i for i, d in enumerate(draws) if not is_greedy(d.params) and finite[i]]
    if random:
        chosen = _draw(logits[random], [draws[i] for i in random])
        for i, token in zip(random, chosen, strict=True):
            tokens[i] = token
    return [token if ok else NOT_FINITE for token, ok in zip(tokens, finite, strict=True)]


def scores_of(logits: Tensor, tokens: Sequence[int], num_tops: Sequence[int]) -> list[TokenScore]:
    """How likely each row's token is by ``logits`` [B, vocabulary], and its likeliest tokens.

    As many of these as ``num_tops`` has for the row, or all where there are fewer.
    """
    assert len(logits) == len(tokens) == len(num_tops), (logits.shape, len(tokens), len(num_tops))
    logits = logits.float()
    logprobs = logits.log_softmax(dim=-1)
    found = logprobs[torch.arange(len(tokens)), list(tokens)]
    finite = logits.isfinite().all(dim=-1)
    found[~finite] = torch.nan
    tops: list[list[tuple[int, float]]] = [[] for _ in tokens]
    for row, num in enumerate(num_tops):
        if num > 0 and finite[row]:
            best = logits[row].sort(descending=True, stable=True).indices[:num]
            tops[row] = list(zip(best.tolist(), logprobs[row, best].tolist(), strict=True))
    return list(map(TokenScore, found.tolist(), tops))


def allows_any(mask: npt.NDArray[np.uint32], num_ids: int) -> bool:
    """Whether ``mask`` is one [words] of ``num_ids`` ids or more, and allows one of those."""
    if mask.dtype != np.uint32 or mask.ndim != 1 or len(mask) * 32 < num_ids:
        return False
    return bool(_allowed(mask, num_ids).any())


def _allowed(mask: npt.NDArray[np.uint32], num_ids: int) -> Tensor:
    """Which of the first ``num_ids`` ids ``mask`` allows, as booleans."""
    words = np.ascontiguousarray(mask, "<u4")
    return torch.from_numpy(np.unpackbits(words.view(np.uint8), bitorder="little")[:num_ids] != 0)


def _biased(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """With each row's bias added, where one has any."""
    rows = [i for i, d in enumerate(draws) if d.params.logit_bias]
    if not rows:
        return logits
    logits = logits.clone()
    for i in rows:
        for token, bias in draws[i].params.logit_bias:
            if token < logits.shape[1]:
                logits[i, token] += bias
    return logits


def _masked(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Minus infinity where a row's token is not allowed."""
    rows = [(i, d.allowed) for i, d in enumerate(draws) if d.allowed is not None]
    if not rows:
        return logits
    logits = logits.clone()
    for i, mask in rows:
        logits[i, ~_allowed(mask, logits.shape[1])] = -torch.inf
    return logits


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
    """Tokens of rows that are not greedy."""
    temperature = torch.tensor([d.params.temperature for d in draws], dtype=torch.float32)
    p = torch.softmax(logits / temperature.unsqueeze(1), dim=-1)
    kept = p.double()
    for row, d in enumerate(draws):
        if has_filter(d.params):
            kept[row].masked_fill_(~_likely(p[row], d.params), 0.0)
        if d.params.typical_p < 1.0:
            kept[row].masked_fill_(~_typical(kept[row], d.params.typical_p), 0.0)
    cumulative = kept.cumsum(dim=-1)
    u = torch.tensor([uniform(d.params.seed, d.position) for d in draws], dtype=torch.float64)
    wanted = u.unsqueeze(1) * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, wanted, right=True).squeeze(1)
    # Rounding may put the number at the very end: the last token that is kept.
    last = kept.shape[1] - 1 - (kept.flip(1) > 0).int().argmax(dim=1)
    tokens: list[int] = torch.minimum(found, last).tolist()
    return tokens


def _likely(p: Tensor, params: SamplingParams) -> Tensor:
    """Which tokens top-k, top-p and min-p keep of the probabilities ``p`` [vocabulary]."""
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


def _typical(weights: Tensor, typical_p: float) -> Tensor:
    """Which tokens locally typical sampling keeps of ``weights`` [vocabulary], some of them 0."""
    p = weights / weights.sum()
    information = -p.log()
    entropy = torch.where(p > 0, p * information, 0.0).sum()
    order = (information - entropy).abs().sort(stable=True).indices
    # The token that reaches typical_p is the last one kept.
    reached = torch.searchsorted(p[order].cumsum(dim=-1), typical_p)
    return torch.zeros_like(p, dtype=torch.bool).index_fill_(0, order[: int(reached) + 1], True)
