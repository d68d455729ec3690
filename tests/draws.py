"""A draw by its definition, written out in numpy, in float64.

Bias, penalties, DRY and mask; of the logits that are left ``top_n_sigma`` keeps those of at
least the largest minus so many of their standard deviations. Then softmax(logits /
temperature), and the other filters: of the
tokens sorted by falling probability, lower ids first where equal, ``top_k`` keeps so
many, ``top_p`` those up to the one at which their sum reaches it, and ``min_p`` those
of at least that fraction of the largest; the shortest of the three is kept. Of
these, made a distribution again, ``typical_p`` keeps those of which -log p is nearest
to the entropy, up to the one at which their sum reaches it. At some positions XTC drops
of these all that have ``xtc_threshold`` but the least likely one. The kept tokens are
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
from server.engine.types import Dry

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
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry: Dry | None = None


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
    for token, taken in repetition(params.dry, recent).items():
        logits[token] -= np.float32(taken)
    return logits


def repetition(dry: Dry | None, recent: Sequence[int]) -> dict[int, float]:
    """What DRY takes off each token that would continue a repetition."""
    found: dict[int, float] = {}
    text = list(recent)[-dry.penalty_last_n :] if dry is not None else []
    for place, length in itertools.product(range(len(text)), range(1, len(text))):
        assert dry is not None
        before, last = text[place - length : place], text[-length:]
        if length > place or length < dry.allowed_length or before != last:
            continue
        if not set(last) & set(dry.breakers):
            taken = min(dry.multiplier * dry.base ** (length - dry.allowed_length), 1000.0)
            found[text[place]] = max(found.get(text[place], 0.0), taken)
    return found


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
        typicals = typical(p, np.sort(order[:num_kept]), params.typical_p)
        for kept in (left for some in typicals for left in without_top(p, some, params, position)):
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


def without_top(
    p: npt.NDArray[np.float64], kept: npt.NDArray[np.intp], params: Params, position: int
) -> Iterator[npt.NDArray[np.intp]]:
    """What XTC may leave of the ascending indices ``kept``, ascending."""
    if uniform(params.seed ^ 0xA0761D6478BD642F, position) >= params.xtc_probability:
        yield kept
        return
    rest = p[kept] / p[kept].sum()
    for by in (-ROUNDING, 0.0, ROUNDING):
        large = np.flatnonzero(rest >= params.xtc_threshold + by)
        by_weight = large[np.lexsort((large, -rest[large]))]
        yield np.delete(kept, by_weight[:-1])


def random_recent(chance: np.random.Generator, vocab_size: int) -> list[int]:
    """Up to 20 tokens, of any or of three, so that they repeat themselves."""
    num_ids = vocab_size if chance.random() < 0.5 else min(vocab_size, 3)
    found: list[int] = chance.integers(num_ids, size=int(chance.integers(20))).tolist()
    return found


def random_dry(chance: np.random.Generator) -> Dry:
    return Dry(
        multiplier=float(chance.choice([0.3, 2.0, 90.0])),
        base=float(chance.choice([1.0, 1.5, 100.0])),
        allowed_length=int(chance.integers(1, 4)),
        penalty_last_n=int(chance.choice([1, 5, 256])),
        breakers=tuple(chance.choice(4, size=int(chance.integers(2))).tolist()),
    )


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
        xtc_probability=some(0.0, 0.5, 1.0),
        xtc_threshold=some(0.1, 1e-3, 0.02, 0.3, 0.5, 0.6),
        dry=random_dry(chance) if chance.random() < 0.5 else None,
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

#: Probabilities, and what XTC leaves of them where it is applied.
XTC_OF = (0.1, 0.4, 0.2, 0.3)
XTC = (
    (Params(xtc_probability=1.0, xtc_threshold=0.15), {0, 2}),
    (Params(xtc_probability=1.0, xtc_threshold=0.25), {0, 2, 3}),
    (Params(xtc_probability=1.0, xtc_threshold=0.35), {0, 1, 2, 3}),
    (Params(xtc_probability=1.0, xtc_threshold=0.45), {0, 1, 2, 3}),
    (Params(xtc_probability=1.0, xtc_threshold=0.0), {0}),
    (Params(xtc_probability=0.0, xtc_threshold=0.15), {0, 1, 2, 3}),
    (Params(xtc_probability=0.5, xtc_threshold=0.15), {0, 1, 2, 3}),
    # Of what the other filters leave: four and three sevenths.
    (Params(xtc_probability=1.0, xtc_threshold=0.4, top_k=2), {3}),
    (Params(xtc_probability=1.0, xtc_threshold=0.1, top_k=1), {1}),
    # Of probabilities by the temperature.
    (Params(xtc_probability=1.0, xtc_threshold=0.24, temperature=100.0), {0}),
    (Params(xtc_probability=1.0, xtc_threshold=0.1, temperature=0.0), {1}),
)

#: What is taken off the logits after a text: by (text, what, by token).
REPETITIONS: tuple[tuple[tuple[int, ...], Dry, dict[int, float]], ...] = (
    ((1, 2, 3, 1, 2), Dry(0.5), {3: 0.5}),
    ((1, 2, 3, 1, 2), Dry(0.5, allowed_length=3), {}),
    ((1, 2, 3, 1, 2), Dry(0.5, allowed_length=1), {3: 0.875}),
    ((4, 1, 2, 3, 4, 1, 2), Dry(0.5, base=3.0), {3: 1.5}),
    # The longest counts, and what overlaps.
    ((4, 1, 2, 3, 9, 1, 2, 3, 4, 1, 2), Dry(0.5, base=3.0), {3: 1.5}),
    ((5, 5, 5, 5), Dry(1.0, base=2.0), {5: 2.0}),
    # Only the last ones are looked at.
    ((1, 2, 3, 1, 2), Dry(0.5, penalty_last_n=5), {3: 0.5}),
    ((1, 2, 3, 1, 2), Dry(0.5, penalty_last_n=4), {}),
    ((1, 2, 3, 1, 2), Dry(0.5, allowed_length=1, penalty_last_n=4), {3: 0.5}),
    # A breaker is no part of it, but may be what comes next.
    ((1, 2, 3, 1, 2), Dry(0.5, breakers=(1,)), {}),
    ((1, 2, 3, 1, 2), Dry(0.5, allowed_length=1, breakers=(1,)), {3: 0.5}),
    ((1, 2, 3, 1, 2), Dry(0.5, breakers=(3,)), {3: 0.5}),
    ((1, 2, 3, 1, 2), Dry(0.5, allowed_length=1, breakers=(2,)), {}),
    ((), Dry(0.5), {}),
    # However long, logits stay finite.
    ((7,) * 256, Dry(100.0, base=100.0), {7: 1000.0}),
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
