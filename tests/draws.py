"""A draw by its definition, written out in numpy, in float64.

Bias, penalties and mask; of the logits that are left ``top_n_sigma`` keeps those of at
least the largest minus so many of their standard deviations. Then softmax(logits /
temperature), and the other filters: of the
tokens sorted by falling probability, lower ids first where equal, ``top_k`` keeps so
many, ``top_p`` those up to the one at which their sum reaches it, and ``min_p`` those
of at least that fraction of the largest; the shortest of the three is kept. Of
these, made a distribution again, ``typical_p`` keeps those of which -log p is nearest
to the entropy, up to the one at which their sum reaches it. The kept tokens are
walked in the order of their ids, and the first at which the running sum passes u
times their sum is drawn.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from server.engine.torch_runner import uniform

#: Of probabilities; those of the native runtime and of torch are float32.
ROUNDING = 3e-7

Logits = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Params:
    """Of one draw; the fields are those of `server.engine.types.SamplingParams`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()


def mask_of(ids: Iterable[int], num_words: int) -> Mask:
    """Allows ``ids`` alone."""
    mask = np.zeros(num_words, np.uint32)
    for id in ids:
        mask[id // 32] |= np.uint32(1 << (id % 32))
    return mask


def penalized(logits: Logits, params: Params, recent: Sequence[int]) -> Logits:
    """With bias and penalties."""
    logits = logits.copy()
    for token, bias in params.logit_bias:
        logits[token] += np.float32(bias)
    for token, count in Counter(recent).items():
        x, factor = logits[token], np.float32(params.repetition_penalty)
        taken = np.float32(params.presence_penalty)
        taken += np.float32(params.frequency_penalty) * np.float32(count)
        logits[token] = (x / factor if x > 0 else x * factor) - taken
    return logits


def allowed(
    logits: Logits,
    params: Params,
    position: int,
    recent: Sequence[int],
    mask: Mask | None = None,
) -> set[int]:
    """The tokens that the definition draws when its numbers are moved by a rounding."""
    x = penalized(logits, params, recent).astype(np.float64)
    ids = np.arange(len(x))
    if mask is not None:
        ids = ids[mask[ids // 32] >> (ids % 32) & 1 == 1]
    if params.temperature == 0.0:
        return {int(ids[x[ids].argmax()])}
    found = set()
    for near in nearest(x[ids], params.top_n_sigma):
        found |= drawn(x[ids[near]], ids[near], params, position)
    return found


def nearest(x: npt.NDArray[np.float64], top_n_sigma: float) -> Iterator[npt.NDArray[np.intp]]:
    """The indices of what ``top_n_sigma`` may leave of the logits ``x``, ascending."""
    if top_n_sigma <= 0.0:
        yield np.arange(len(x))
        return
    for by in (-1e-9, 0.0, 1e-9):
        least = x.max() - top_n_sigma * x.std() + by
        yield np.flatnonzero((x >= least) | (x == x.max()))


def drawn(
    x: npt.NDArray[np.float64], ids: npt.NDArray[np.intp], params: Params, position: int
) -> set[int]:
    """Of the logits ``x`` of the ascending ``ids``: see `allowed`."""
    x = x / float(np.float32(params.temperature))
    p = np.exp(x - x.max())
    order = np.lexsort((ids, -p))
    u, found = uniform(params.seed, position), set()
    for num_kept in kept_counts(p[order] / p.sum(), params):
        for kept in typical(p, np.sort(order[:num_kept]), params.typical_p):
            running = np.cumsum(p[kept])
            for moved in (u - ROUNDING, u, u + ROUNDING):
                index = int(np.searchsorted(running, moved * running[-1], side="right"))
                found.add(int(ids[kept[min(index, len(kept) - 1)]]))
    return found


def kept_counts(p: npt.NDArray[np.float64], params: Params) -> set[int]:
    """How many of the sorted probabilities top_k, top_p and min_p may keep."""
    counts = set()
    for by in (-ROUNDING, 0.0, ROUNDING):
        kept = min(params.top_k or len(p), len(p))
        if params.top_p < 1.0:
            reached = np.searchsorted(np.cumsum(p), params.top_p + by)
            kept = min(kept, int(reached) + 1)
        kept = min(kept, int((p >= params.min_p * p[0] * (1 + 10 * by)).sum()))
        counts.add(max(kept, 1))
    return counts


def typical(
    p: npt.NDArray[np.float64], kept: npt.NDArray[np.intp], typical_p: float
) -> Iterator[npt.NDArray[np.intp]]:
    """What ``typical_p`` may leave of the ascending indices ``kept``, ascending."""
    if typical_p >= 1.0:
        yield kept
        return
    rest = p[kept] / p[kept].sum()
    information = -np.log(rest, where=rest > 0, out=np.full_like(rest, np.inf))
    entropy = float(rest[rest > 0] @ information[rest > 0])
    for by, shift in itertools.product((-ROUNDING, 0.0, ROUNDING), (-3e-6, 0.0, 3e-6)):
        order = np.argsort(np.abs(information - entropy - shift), kind="stable")
        reached = int(np.searchsorted(np.cumsum(rest[order]), typical_p + by))
        yield np.sort(kept[order[: reached + 1]])


def random_params(chance: np.random.Generator, vocab_size: int) -> Params:
    def some(off: float, *on: float) -> float:
        return float(chance.choice(on)) if chance.random() < 0.5 else off

    biased = chance.choice(vocab_size, size=min(vocab_size, 5), replace=False)
    bias: Any = tuple((int(id), float(chance.normal() * 3)) for id in biased)
    return Params(
        temperature=float(chance.choice([0.0, 0.01, 0.3, 0.8, 1.0, 2.0])),
        top_k=int(some(0, 1, 2, 5, 40, 200, 5000)),
        top_p=some(1.0, 1e-4, 0.1, 0.5, 0.9, 0.95, 0.999),
        min_p=some(0.0, 1e-4, 0.01, 0.05, 0.3, 1.0),
        repetition_penalty=some(1.0, 0.5, 1.1, 2.0),
        presence_penalty=some(0.0, -2.0, 0.4, 2.0),
        frequency_penalty=some(0.0, -0.3, 0.3),
        seed=int(chance.integers(2**63)),
        typical_p=some(1.0, 1e-4, 0.1, 0.5, 0.9, 0.99),
        top_n_sigma=some(0.0, 1e-4, 0.5, 1.0, 2.0, 100.0),
        logit_bias=bias if chance.random() < 0.5 else (),
    )


def random_logits(chance: np.random.Generator, kind: str, vocab_size: int) -> Logits:
    """Of one `KINDS`."""
    logits = chance.normal(size=vocab_size) * {"peaked": 8.0, "flat": 0.0}.get(kind, 2.0)
    return (np.round(logits) if kind == "ties" else logits).astype(np.float32)


#: Probabilities with an entropy of 1.33, which 0.2 is nearer to than 0.4, and what is kept of them.
TYPICAL_OF = (0.4, 0.2, 0.2, 0.2)
TYPICAL = (
    (Params(typical_p=5e-324), {1}),
    (Params(typical_p=0.1), {1}),
    (Params(typical_p=0.35), {1, 2}),
    (Params(typical_p=0.55), {1, 2, 3}),
    (Params(typical_p=0.65), {0, 1, 2, 3}),
    (Params(typical_p=0.999), {0, 1, 2, 3}),
    # Of two thirds and one third: an entropy of 0.64, with -log p of 0.41 and 1.10.
    (Params(top_k=2, typical_p=0.1), {0}),
    (Params(top_k=1, typical_p=0.1), {0}),
    (Params(min_p=1.0, typical_p=0.1), {0}),
    # A sharper one is all but certain of the first.
    (Params(temperature=0.1, typical_p=0.5), {0}),
)

#: Logits with a standard deviation of 2, and what is kept of them.
SIGMA_OF = (1.0, 5.0, 1.0, 5.0)
SIGMA = (
    (Params(top_n_sigma=1e-9), {1, 3}),
    (Params(top_n_sigma=1.999), {1, 3}),
    (Params(top_n_sigma=2.0), {0, 1, 2, 3}),
    (Params(top_n_sigma=100.0), {0, 1, 2, 3}),
    (Params(top_n_sigma=-1.0), {0, 1, 2, 3}),
    (Params(top_n_sigma=1.999, temperature=100.0), {1, 3}),
    (Params(top_n_sigma=1.0, top_k=1), {1}),
    # Half of the mass that it leaves is in the first token, and less than half of all.
    (Params(top_n_sigma=1.0, top_p=0.5), {1}),
    # With the bias the deviation is 2.83, and others are 4 below the largest.
    (Params(top_n_sigma=1.4, logit_bias=((0, 8.0),)), {0}),
    (Params(top_n_sigma=1.5, logit_bias=((0, 8.0),)), {0, 1, 3}),
)

KINDS = ("normal", "peaked", "ties", "flat")


def random_mask(chance: np.random.Generator, vocab_size: int) -> Mask | None:
    """None, a few tokens, or about half, and bits of tokens that do not exist."""
    words = (vocab_size + 31) // 32 + 1
    if chance.random() < 0.4:
        return None
    mask = chance.integers(2**32, size=words, dtype=np.uint32)
    if chance.random() < 0.5:
        few = chance.integers(vocab_size, size=3)
        mask[: vocab_size // 32 + 1] = mask_of(few.tolist(), words)[: vocab_size // 32 + 1]
    mask[0] |= np.uint32(1)
    return mask
