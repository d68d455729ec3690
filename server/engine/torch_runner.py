"""Runs the model on torch, with the same bits in any company, and draws its tokens."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.network import ModelState, Network
from model.state_tensors import rounded, rounded_fields, state_views, widened
from server.engine.runner import (
    HIDDEN_UNIT,
    NOT_FINITE,
    NOTHING,
    CpuStatePool,
    Feed,
    Mask,
    RowOutput,
    TokenScore,
)
from server.engine.sampling import has_filter, has_penalty, is_greedy
from server.engine.types import Dry, SamplingParams

# -------------------------------------------------------------------------------------------------
# Finds batch sizes in which the matrix library gives each row the same bits.
#
# A library picks its kernel by the shape of a product, and kernels add in different
# orders. So a row's bits may change with the number of rows in its batch, and with
# its place among them: the last rows may go through other instructions than the
# first. `row_sizes` runs the model's own `step` at a few batch sizes and returns
# those in which every place of every size gives a row the same bits. Batches of
# these sizes are all that the runner makes, so what is tried is all that is used.
# In most sums another order changes no bit, above all where they are rounded to
# bfloat16; so products of the weights' shapes are tried with numbers that tell.
#
# Size 1 needs no trial: a row alone always has the same shapes. Where nothing else
# can be had, steps run one row at a time: slowly, with the same bits.


logger = logging.getLogger("everstream.engine")

#: Batch sizes of `step` that are tried.
SIZES = (1, 4, 8, 16, 32, 64)

#: What the texts of a trial have before them: more than a window of the usual length.
PAST_TOKENS = 100

#: How much larger than the others the terms are that cancel.
LARGE = 2.0**20

#: A batch is padded where at least this part of it is used.
MIN_USE = 0.6

#: Results by model and number of threads; what else they depend on does not change in a process.
_known: weakref.WeakKeyDictionary[Network, dict[int, tuple[int, ...]]]
_known = weakref.WeakKeyDictionary()


def row_sizes(model: Network) -> tuple[int, ...]:
    """Batch sizes, ascending, such that `step` gives a row the same bits in all of them.

    Tried once for each model and number of threads.
    """
    known, num_threads = _known.setdefault(model, {}), torch.get_num_threads()
    if num_threads not in known:
        known[num_threads] = _tried(model)
        shown = ", ".join(map(str, known[num_threads]))
        logger.info("torch computes the same bits for a row in batches of %s rows", shown)
    return known[num_threads]


def batches(num_rows: int, sizes: tuple[int, ...]) -> list[int]:
    """The sizes of the batches that take ``num_rows``; the last may have more room than rows."""
    parts = []
    while num_rows > 0:
        holds = min((size for size in sizes if size >= num_rows), default=sizes[-1])
        fills = max((size for size in sizes if size <= num_rows), default=holds)
        parts.append(holds if num_rows >= MIN_USE * holds else fills)
        num_rows -= parts[-1]
    return parts


@torch.inference_mode()
def _tried(model: Network) -> tuple[int, ...]:
    """The largest set of sizes that agree; of equally large ones that with the smaller sizes."""
    run = _trial(model)
    groups: list[tuple[Tensor, list[int]]] = []
    for size in SIZES:
        bits = _bits_everywhere(run, size)
        if bits is None:
            continue
        for known, sizes in groups:
            if torch.equal(known, bits):
                sizes.append(size)
                break
        else:
            groups.append((bits, [size]))
    return max((tuple(sizes) for _, sizes in groups), key=len)


def _bits_everywhere(run: Callable[[Tensor], Tensor], size: int) -> Tensor | None:
    """The bits of two texts, [2, bytes], if each has the same at every place of a batch."""
    place = torch.arange(size)
    first, second = run(place % 2), run((place + 1) % 2)
    bits = torch.stack([first[0], second[0]])
    agree = torch.equal(first, bits[place % 2]) and torch.equal(second, bits[(place + 1) % 2])
    return bits if agree else None


def _trial(model: Network) -> Callable[[Tensor], Tensor]:
    """A run of chosen rows of two texts; gives all that it computes as bytes [rows, bytes].

    That is the logits and states of `step`, and the products of `_products`. The states
    are those of random texts. Random numbers in their place would do worse: sums of
    positive features, say, would have both signs, and a denominator near zero drowns the
    differences that are looked for.
    """
    device = model.head_weight.device
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(model.config.vocab_size, (2, PAST_TOKENS + 1), generator=generator)
    texts = texts.to(device)
    start = torch.zeros(2, dtype=torch.int64, device=device)
    _, state = model.hidden_chunk(texts[:, :-1], model.empty_state(2), start)
    products = _products(model, generator)

    def run(rows: Tensor) -> Tensor:
        part = tuple({name: t[rows] for name, t in layer.items()} for layer in state)
        logits, after = model.step(texts[rows, -1], part, start[rows] + PAST_TOKENS)
        tensors = [logits, *(t for layer in after for t in layer.values())]
        tensors += [product(rows) for product in products]
        flat = [t.reshape(len(rows), -1).contiguous().view(torch.uint8) for t in tensors]
        return torch.cat(flat, dim=1)

    return run


def _products(model: Network, generator: torch.Generator) -> list[Callable[[Tensor], Tensor]]:
    """Products like those with the model's weights, one for each shape, of numbers that tell."""
    like = {(model.head_weight.shape, False, model.head_weight.dtype)}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight, has_bias = module.weight, module.bias is not None
            # Some layers compute in float32, whatever the model's dtype.
            like |= {(weight.shape, has_bias, dtype) for dtype in (weight.dtype, torch.float32)}
    return [_product(*each, generator) for each in sorted(like, key=str)]


def _product(
    shape: torch.Size, has_bias: bool, dtype: torch.dtype, generator: torch.Generator
) -> Callable[[Tensor], Tensor]:
    """The product of chosen rows of two inputs with a matrix of this shape and equal rows.

    Half of the terms are large and cancel in pairs, and how much of the others is lost
    between them depends on the order of all.
    """
    num_outputs, width = shape
    first, second = torch.randperm(width, generator=generator)[: width // 4 * 2].chunk(2)
    inputs, weights = torch.randn(3, width, generator=generator).split([2, 1])
    inputs[:, second] = inputs[:, first]
    weights[:, first] *= LARGE
    weights[:, second] = -weights[:, first]
    inputs, weights = inputs.to(dtype), weights.to(dtype)
    bias = torch.zeros(num_outputs, dtype=dtype) if has_bias else None
    return lambda rows: F.linear(inputs[rows], weights.repeat(num_outputs, 1), bias)


# -------------------------------------------------------------------------------------------------
# Draws the next token of each row from its logits, reproducibly.
#
# Order: logit bias; repetition penalty, then presence and frequency penalty; DRY; the
# mask of what is allowed; top-n-sigma; temperature; top-k, top-p and min-p, each of which keeps
# a prefix of the tokens sorted by probability (equals by id), so that their order
# does not matter: the shortest prefix wins; then typical-p, of what these have
# left; and last XTC, of what that has left. Greedy, at temperature 0 or top-p 0, takes
# the largest after the mask. The draw walks the kept tokens in the order of their ids to
# a number in [0, 1), times their mass, that is a function of (seed, position) alone: it
# does not depend on what else is in the batch or on what was drawn before.
# `model/ops/cpu/src/runtime/sampler.cpp` draws alike.
#
# - ``logit_bias``: added to the logits, as at OpenAI.
# - ``repetition_penalty``: Keskar et al. 2019, CTRL, section 4.1.
# - ``presence_penalty``, ``frequency_penalty``: OpenAI's.
# - ``top_k``: Fan et al. 2018, section 5.4; ``top_p``: Holtzman et al. 2020, section
#   3.1; ``min_p``: Nguyen et al. 2024, section 3.
# - ``top_n_sigma``: Tang et al. 2024, Top-n-sigma: of the logits that are left, those of at least
#   their maximum minus n of their standard deviations (divided by their number, not by one less).
#   The temperature would scale both alike, and so does not change what is kept. As in llama.cpp
#   it comes before the others, which see the distribution that is left.
# - ``typical_p``: Meister et al. 2022, Locally Typical Sampling, section 4: of the
#   distribution that is left, the tokens of which the information -log p is nearest
#   to the entropy H, as many as reach a mass of ``typical_p`` together. It can drop
#   the most likely token, for which reason it is after those: a prefix taken of what it
#   keeps, or an intersection with one, could be another or empty.
# - ``dry``: p-e-w 2024, Don't Repeat Yourself, of text-generation-webui; see `types.Dry`.
# - ``xtc_probability``, ``xtc_threshold``: p-e-w 2024, Exclude Top Choices. Whether it is applied
#   is a number of its own from (seed, position). As in llama.cpp it is the last filter; there the
#   temperature comes after it, here before all of them.
#
# Log-probabilities are of the logits before all of these.


_MASK = (1 << 64) - 1
#: Another number at each position than that of the draw.
_XTC_STREAM = 0xA0761D6478BD642F
#: No token with it is drawn where another one can be, and it leaves logits finite.
MAX_DRY_PENALTY = 1000.0


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
    logits = _without_repetition(_penalized(_biased(logits.float(), draws), draws), draws)
    finite: list[bool] = logits.isfinite().all(dim=-1).tolist()
    logits = _masked(logits, draws)
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    random = [i for i, d in enumerate(draws) if not is_greedy(d.params) and finite[i]]
    if random:
        chosen = _drawn(logits[random], [draws[i] for i in random])
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


def _without_repetition(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Lowers the logits of what would continue a repetition: see `types.Dry`."""
    rows = [(i, d.params.dry, d.recent) for i, d in enumerate(draws) if d.params.dry and d.recent]
    if not rows:
        return logits
    logits = logits.clone()
    for i, dry, recent in rows:
        for token, length in _repeated(dry, recent).items():
            if token < logits.shape[1]:
                logits[i, token] -= _dry_penalty(dry, length)
    return logits


def _repeated(dry: Dry, recent: Sequence[int]) -> dict[int, int]:
    """How long a repetition each token would continue, where that is not allowed."""
    backwards = list(recent[max(len(recent) - dry.penalty_last_n, 0) :])[::-1]
    longest = next((i for i, t in enumerate(backwards) if t in dry.breakers), len(backwards))
    found: dict[int, int] = {}
    for place, token in enumerate(backwards[:-1]):
        length, before = 0, backwards[place + 1 :][:longest]
        while length < len(before) and before[length] == backwards[length]:
            length += 1
        if length >= dry.allowed_length:
            found[token] = max(found.get(token, 0), length)
    return found


def _dry_penalty(dry: Dry, length: int) -> float:
    """By products, which have the same bits everywhere; a power has not."""
    penalty = dry.multiplier
    for _ in range(dry.allowed_length, length):
        penalty = min(penalty * dry.base, MAX_DRY_PENALTY)
    return min(penalty, MAX_DRY_PENALTY)


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


def _without_far(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Minus infinity where top-n-sigma drops a row's token, for each row by itself."""
    rows = [i for i, d in enumerate(draws) if d.params.top_n_sigma > 0.0]
    if not rows:
        return logits
    logits = logits.clone()
    for i in rows:
        # Distances are exact where all are equal, which then have no variance.
        distance = logits[i].max().double() - logits[i].double()
        finite = distance[distance.isfinite()]
        variance = (finite.square().mean() - finite.mean().square()).clamp(min=0.0)
        logits[i, distance > draws[i].params.top_n_sigma * variance.sqrt()] = -torch.inf
    return logits


def _drawn(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Tokens of rows that are not greedy."""
    logits = _without_far(logits, draws)
    temperature = torch.tensor([d.params.temperature for d in draws], dtype=torch.float32)
    p = torch.softmax(logits / temperature.unsqueeze(1), dim=-1)
    kept = p.double()
    for row, d in enumerate(draws):
        if has_filter(d.params):
            kept[row].masked_fill_(~_likely(p[row], d.params), 0.0)
        if d.params.typical_p < 1.0:
            kept[row].masked_fill_(~_typical(kept[row], d.params.typical_p), 0.0)
        if excludes_top_choices(d.params, d.position):
            kept[row].masked_fill_(_top_choices(kept[row], d.params.xtc_threshold), 0.0)
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


def excludes_top_choices(params: SamplingParams, position: int) -> bool:
    """Whether XTC is applied at ``position``; two tokens cannot both have more than half."""
    if params.xtc_probability <= 0.0 or params.xtc_threshold > 0.5:
        return False
    return uniform(params.seed ^ _XTC_STREAM, position) < params.xtc_probability


def _top_choices(weights: Tensor, threshold: float) -> Tensor:
    """Which of ``weights`` [vocabulary] XTC drops: of the large ones all but the smallest."""
    large = weights >= threshold * weights.sum()
    if not bool(large.any()):
        return large
    smallest = weights[large].min()
    large[int((large & (weights == smallest)).nonzero()[-1])] = False
    return large


# -------------------------------------------------------------------------------------------------
# A row's result must not depend on how many rows share its batch. So steps and
# logits run in batches of a few sizes, all rows of which get the same bits: see
# `server.engine.torch_runner`, which finds them at start. A chunk has a call of its
# own, and the same shapes always. Chunks and single steps agree up to rounding only,
# so prompts are cut on a grid. Where sums are stored in bfloat16 each token rounds them, so the
# tokens of a chunk are steps.


#: Chunk sizes of prompts, each a multiple of the next.
GRID = (64, 16)

Forward = Callable[[Tensor, ModelState, Tensor], tuple[Tensor, ModelState]]

#: What slots [B] int64 will hold: the first B rows of a state.
Change = tuple[Tensor, ModelState]


class TorchRunner:
    """See `server.engine.runner.Runner`. The model is on the CPU, where the pool is.

    Only the first ``num_ids`` ids are drawn: a model's vocabulary may be padded
    beyond the tokenizer's, and those ids stand for nothing.
    """

    def __init__(
        self,
        model: Network,
        pool: CpuStatePool,
        num_ids: int,
        grid: tuple[int, ...] = GRID,
    ) -> None:
        self.grid = grid
        self._num_ids, self._num_slots = num_ids, pool.num_slots
        self._model = model
        self._views = state_views(pool.layout, torch.from_numpy(pool.blocks))
        self._rounded = rounded_fields(pool.layout)
        self.row_sizes = row_sizes(model)

    def prepare(self, params: SamplingParams) -> SamplingParams:
        """The sampler takes them as they are."""
        return params

    @torch.inference_mode()
    def run(self, feeds: Sequence[Feed]) -> list[RowOutput]:
        """See `server.engine.runner.Runner.run`. Chunks of each size, then single tokens.

        The pool changes at the end, when nothing is left that may fail.
        """
        self._check(feeds)
        rows: dict[int, Tensor] = {}
        changes: list[Change] = []
        for size in sorted({len(feed.tokens) for feed in feeds}, reverse=True):
            index = [i for i, feed in enumerate(feeds) if len(feed.tokens) == size]
            part = [feeds[i] for i in index]
            logits = self._decode(part, changes) if size == 1 else self._prefill(part, changes)
            rows.update(zip(index, logits, strict=True))
        outputs = self._sample(feeds, rows)
        self._commit(changes)
        return outputs

    @torch.inference_mode()
    def score(self, feed: Feed, following: int, num_top: int = 0) -> list[TokenScore]:
        """See `server.engine.runner.Runner.score`."""
        self._check([feed])
        scored, changes = [*feed.tokens[1:], following], list[Change]()
        if not all(0 <= token < self._num_ids for token in scored):
            raise ValueError(f"token ids to score must be in 0..{self._num_ids - 1}")
        if len(feed.tokens) == 1:
            logits = self._decode([feed], changes)
        else:
            logits = self._logits(self._chunk(feed, changes))
        scores = scores_of(logits[:, : self._num_ids], scored, [num_top] * len(scored))
        self._commit(changes)
        return scores

    @torch.inference_mode()
    def embed(self, feed: Feed) -> npt.NDArray[np.float64]:
        """See `server.engine.runner.Runner.embed`."""
        self._check([feed])
        changes: list[Change] = []
        if len(feed.tokens) == 1:
            hidden = self._step(self._model.hidden_step, [feed], changes)
        else:
            hidden = self._chunk(feed, changes)
        units = (hidden.double() / HIDDEN_UNIT).round()
        total: npt.NDArray[np.float64] = (units.sum(dim=0) * HIDDEN_UNIT).numpy()
        self._commit(changes)
        return total

    def _check(self, feeds: Sequence[Feed]) -> None:
        """Raises `ValueError` for lengths, masks, and slots that torch would take for others."""
        if not all(len(feed.tokens) in (1, *self.grid) for feed in feeds):
            raise ValueError(f"a row must have 1 token or a chunk of {self.grid}")
        slots = [feed.slot for feed in feeds]
        num_slots = self._num_slots
        if len(set(slots)) < len(slots) or not all(0 <= slot < num_slots for slot in slots):
            raise ValueError(f"slots must differ and be in 0..{num_slots - 1}, not {slots}")
        if any(feed.num_draws != 1 for feed in feeds):
            raise ValueError("a row draws one token at most")
        masks = (_mask(feed) for feed in feeds if feed.draw is not None)
        if not all(mask is None or allows_any(mask, self._num_ids) for mask in masks):
            raise ValueError("a mask must be uint32, have bits for all ids, and allow one of them")

    def _sample(self, feeds: Sequence[Feed], rows: dict[int, Tensor]) -> list[RowOutput]:
        """What all rows draw, from the logits of those that may."""
        outputs: list[RowOutput] = [NOTHING] * len(feeds)
        index = [i for i, feed in enumerate(feeds) if feed.draw is not None]
        if not index:
            return outputs
        draws = [_draw(feeds[i]) for i in index]
        logits = torch.stack([rows[i] for i in index])[:, : self._num_ids]
        drawn = sample(logits, draws)
        for i, token in zip(index, drawn, strict=True):
            outputs[i] = (token,), (math.nan,), ((),)
        wanted = [row for row, i in enumerate(index) if feeds[i].wants_logprobs and drawn[row] >= 0]
        if wanted:
            num_tops = [draws[row].params.top_logprobs or 0 for row in wanted]
            scores = scores_of(logits[wanted], [drawn[row] for row in wanted], num_tops)
            for row, (logprob, top) in zip(wanted, scores, strict=True):
                outputs[index[row]] = (drawn[row],), (logprob,), (top,)
        return outputs

    def _prefill(self, feeds: list[Feed], changes: list[Change]) -> Tensor:
        """A chunk for each slot; the logits after its last token, [B, vocabulary] float32."""
        return self._logits(torch.stack([self._chunk(feed, changes)[-1] for feed in feeds]))

    def _decode(self, feeds: list[Feed], changes: list[Change]) -> Tensor:
        """One token for each slot; the logits after it, [B, vocabulary] float32."""
        return self._step(self._model.step, feeds, changes).float()

    def _chunk(self, feed: Feed, changes: list[Change]) -> Tensor:
        """The hidden states after each token of ``feed``, [T, D]; its new state to ``changes``."""
        slot, position = torch.tensor([feed.slot]), torch.tensor([feed.position])
        tokens = torch.tensor([list(feed.tokens)])
        if self._rounded:
            return self._steps(slot, tokens[0], position, changes)
        hidden, state = self._model.hidden_chunk(tokens, self._gather(slot), position)
        changes.append((slot, state))
        return hidden[0]

    def _steps(
        self, slot: Tensor, tokens: Tensor, position: Tensor, changes: list[Change]
    ) -> Tensor:
        """As `_chunk`, one token after the other, in a batch that has the row in every place."""
        (size,) = batches(1, self.row_sizes)
        state, hidden = self._gather(slot.expand(size)), []
        for i, token in enumerate(tokens):
            at = (position + i).expand(size)
            x, state = self._model.hidden_step(token.expand(size), state, at)
            stored = rounded(self._rounded, state, at)
            state = widened(self._rounded, stored)
            hidden.append(x[0])
        changes.append((slot, stored))
        return torch.stack(hidden)

    def _step(self, forward: Forward, feeds: list[Feed], changes: list[Change]) -> Tensor:
        """``forward`` over all slots, [B, ...]; their new states to ``changes``."""
        slots = torch.tensor([feed.slot for feed in feeds])
        positions = torch.tensor([feed.position for feed in feeds])
        tokens = torch.tensor([feed.tokens[0] for feed in feeds])
        outputs = []
        for rows, num in self._batches(len(feeds)):
            output, state = forward(tokens[rows], self._gather(slots[rows]), positions[rows])
            if self._rounded:
                state = rounded(self._rounded, state, positions[rows])
            changes.append((slots[rows[:num]], state))
            outputs.append(output[:num])
        return torch.cat(outputs)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[B, D] to [B, vocabulary] float32."""
        parts = [self._model.logits(hidden[rows])[:num] for rows, num in self._batches(len(hidden))]
        return torch.cat(parts).float()

    def _batches(self, num_rows: int) -> Iterator[tuple[Tensor, int]]:
        """The rows of each batch, of which the first so many count; the rest repeats the last.

        What is taken by these indices is a copy, and so starts where products are fastest
        and always alike: the bits of some kernels depend on the address.
        """
        start = 0
        for size in batches(num_rows, self.row_sizes):
            rows = torch.arange(start, start + size).clamp_max(num_rows - 1)
            yield rows, min(size, num_rows - start)
            start += size

    def _gather(self, slots: Tensor) -> ModelState:
        """A copy of the states of ``slots`` [B] int64, as a step computes them."""
        stored = tuple(
            {n: t.index_select(0, slots) for n, t in layer.items()} for layer in self._views
        )
        return widened(self._rounded, stored)

    def _commit(self, changes: list[Change]) -> None:
        """Writes them into the pool."""
        for slots, state in changes:
            for views, layer in zip(self._views, state, strict=True):
                for name, tensor in layer.items():
                    views[name].index_copy_(0, slots, tensor[: len(slots)])


def _draw(feed: Feed) -> Draw:
    assert isinstance(feed.draw, SamplingParams), feed.draw
    return Draw(feed.draw, feed.position + len(feed.tokens), feed.recent or (), _mask(feed))


def _mask(feed: Feed) -> Mask | None:
    """That of the row's one draw."""
    return None if feed.allowed is None else feed.allowed[0]
