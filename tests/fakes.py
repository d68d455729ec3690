"""The real engine over a runner without a model, and a native runtime without one.

Bytes are tokens. What `FakeEngine` generates depends on the seed and the position alone:
a fixed story, or one that a test gives, read from a place that the seed chooses. Words in a
prompt make it misbehave: ``END`` at its end generates the end-of-text token at once,
``<fail>`` fails the request, ``<crash>`` the engine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from model.config import ModelConfig
from model.state import StateLayout
from model.tokenizer import Tokenizer
from server.engine.engine import Engine, EngineConfig
from server.engine.runner import (
    NOT_FINITE,
    NOTHING,
    CpuStatePool,
    Feed,
    Mask,
    RowOutput,
    Runner,
    TokenScore,
)
from server.engine.sampling import has_penalty
from server.engine.session import SessionValue
from server.engine.types import Event, Request, SamplingParams
from server.models.service import ModelInfo, StateTensorInfo

EOS = 256
STORY = (
    "Once upon a time there was a little fox who lived under an old oak. “Where does the river "
    "go?” she asked the owl. The owl did not know, so the fox packed a piece of bread and walked "
    "beside the water all day long. At the café by the sea she met a crab, who said: “It goes on.” "
    "And so did she.\n\n"
).encode()

#: A state is eight numbers: a digest of all tokens, how many there were, and the last six.
STATE_BYTES = 8 * 8

MODEL = ModelInfo(
    name="fake",
    digest="0" * 64,
    attention="gated",
    dtype="float32",
    parameters=5_000_000,
    vocab_size=257,
    state_bytes_per_session=STATE_BYTES,
    fixed_state_bytes=STATE_BYTES,
    state_bytes_per_token=0,
    context=0,
    past=None,
    kv_cache_bytes_per_token=2 * 6 * 4 * 64 * 2,
    max_sessions=16,
    state=(StateTensorInfo("S", (8,), "float64", 1, STATE_BYTES),),
    created_s=1_700_000_000,
    bos_token_id=EOS,
    hidden_size=4,
)


class ByteTokenizer:
    """UTF-8 bytes as ids, and one more for the end of text."""

    vocab_size = 257
    eos_token_id, eos_token_ids = EOS, (EOS,)
    puts_space_in_front = False
    special_ids = {"<|endoftext|>": EOS}  # noqa: RUF012 - never written to
    special_names = {EOS: "<|endoftext|>"}  # noqa: RUF012 - never written to
    silent_ids = frozenset((EOS,))

    def remembering(self) -> ByteTokenizer:
        return self

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        if not allow_special:
            return list(text.encode())
        return self.encode_pieces(self.pieces(text))

    def pieces(self, text: str) -> Iterator[str | int]:
        first, *rest = text.split("<|endoftext|>")
        yield first
        for piece in rest:
            yield from (EOS, piece)

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        found = [[piece] if isinstance(piece, int) else self.encode(piece) for piece in pieces]
        return [id for ids in found for id in ids]

    def encode_exact(self, text: str) -> list[int]:
        return self.encode(text)

    encode_continuation = encode_exact

    def token_bytes(self, id: int) -> bytes:
        return b"" if id == EOS else bytes([id])

    first_bytes = token_bytes


def told_after(num_tokens: int, text: str) -> list[int]:
    """A story that is ``text`` and its end after a prompt of ``num_tokens``, with the seed 0."""
    story = [*text.encode(), EOS]
    start = num_tokens % len(story)
    return story[-start:] + story[:-start] if start else story


def state_after(tokens: Iterable[int], state: bytes = bytes(STATE_BYTES)) -> bytes:
    """What `FakeRunner` makes of ``state`` by feeding ``tokens``."""
    digest, count, *last = np.frombuffer(state, np.int64).tolist()
    for token in tokens:
        digest = (digest * 1_000_003 + token + 1) % (1 << 61)
        count += 1
        last = [*last[1:], token]
    return np.array([digest, count, *last], np.int64).tobytes()


class FakeRunner:
    """See `server.engine.runner.Runner`: any cut of a prompt gives the same.

    Where a feed does not allow the story's letter, the seed and the position choose
    among those that it allows. A feed at another position than the state's is a
    ``fault``, for which the engine must die: as an error of `run` it would be that
    of one request.
    """

    grid: tuple[int, ...] = ()

    def __init__(self, pool: CpuStatePool, story: Sequence[int] = STORY) -> None:
        self._pool, self._story = pool, story
        self.fault: Exception | None = None

    def prepare(self, params: SamplingParams) -> SamplingParams:
        return params

    def run(self, feeds: Sequence[Feed]) -> list[RowOutput]:
        slots = [feed.slot for feed in feeds]
        assert len(set(slots)) == len(slots), slots
        masks = [mask for f in feeds if f.draw is not None for mask in f.allowed or ()]
        if not all(map(allowed_ids, masks)):
            raise ValueError("no token is allowed")
        return [self._row(feed) for feed in feeds]

    def score(self, feed: Feed, following: int, num_top: int = 0) -> list[TokenScore]:
        """A token's is the same everywhere: see `score_of`."""
        self._feed(feed)
        return [
            TokenScore(score_of(token), most_likely(num_top))
            for token in (*feed.tokens[1:], following)
        ]

    def embed(self, feed: Feed) -> npt.NDArray[np.float64]:
        """A token's is the same everywhere: see `embedding_of`. NaN after ``<fail``."""
        words = self._feed(feed)
        total = np.sum([embedding_of(token) for token in feed.tokens], axis=0)
        return cast(npt.NDArray[np.float64], total * (math.nan if b"<fail" in words else 1.0))

    def _row(self, feed: Feed) -> RowOutput:
        if feed.draw is None:
            words = self._feed(feed)
            return ((NOT_FINITE,), (), ()) if b"<fail" in words else NOTHING
        assert isinstance(feed.draw, SamplingParams)
        assert feed.allowed is None or len(feed.allowed) == feed.num_draws, feed
        first = len(feed.tokens) - feed.num_draws
        tokens = [
            self._drawn(feed, self._feed(feed, begin, end), end, mask)
            for (begin, end), mask in zip(
                itertools.pairwise((0, *range(first + 1, len(feed.tokens) + 1))),
                feed.allowed or itertools.repeat(None),
                strict=False,
            )
        ]
        if not feed.wants_logprobs:
            return tokens, (), ()
        num_top = feed.draw.top_logprobs or 0
        return tokens, list(map(score_of, tokens)), [most_likely(num_top) for _ in tokens]

    def _drawn(self, feed: Feed, words: bytes, end: int, mask: Mask | None) -> int:
        """The token after the first ``end`` of a feed's."""
        if b"<fail" in words:
            return NOT_FINITE
        params: SamplingParams = feed.draw
        ids, place = allowed_ids(mask), feed.position + end
        if words.endswith(b"END") and feed.tokens[end - 1] != EOS and EOS in ids:
            return EOS
        token = self._story[(params.seed * 7 + place) % len(self._story)]
        return token if token in ids else ids[(params.seed * 7 + place) % len(ids)]

    def _feed(self, feed: Feed, begin: int = 0, end: int | None = None) -> bytes:
        """Advances the state by a part of a feed; returns it, after the six tokens before it.

        As text. A prompt that asks for it makes the engine crash.
        """
        if feed.target is not None and not begin:
            self._pool.fixed(feed.target)[:] = self._pool.fixed(feed.slot)
        slot = feed.slot if feed.target is None else feed.target
        state, tokens = self._pool.fixed(slot).view(np.int64), feed.tokens[begin:end]
        if state[1] != feed.position + begin:
            self.fault = AssertionError(f"fed at {feed.position + begin}, not {state[1]}")
        text = bytes(token for token in (*state[2:].tolist(), *tokens) if token < EOS)
        state[:] = np.frombuffer(state_after(tokens, state.tobytes()), np.int64)
        # Without the last letter, which is still pending where nothing is generated.
        if b"<crash" in text:
            self.fault = RuntimeError("asked to crash")
        return text


def score_of(token: int) -> float:
    """What `FakeRunner` takes for the log-probability of ``token``."""
    return -(1 + token % 8) / 4


def most_likely(num: int) -> list[tuple[int, float]]:
    """The first by `score_of`: 0, 8, 16 and so on."""
    ids = sorted(range(ByteTokenizer.vocab_size), key=score_of, reverse=True)
    return [(token, score_of(token)) for token in ids[:num]]


def embedding_of(token: int) -> npt.NDArray[np.float64]:
    """What `FakeRunner` takes for the last hidden state of ``token``."""
    return np.array([1.0, token, token % 7, -token / 4])


def allowed_ids(
    mask: npt.NDArray[np.uint32] | None, vocab_size: int = ByteTokenizer.vocab_size
) -> Sequence[int]:
    """The ids that a `Feed.allowed` has, ascending; all of them where there is none."""
    ids = range(vocab_size)
    return ids if mask is None else [id for id in ids if mask[id // 32] >> (id % 32) & 1]


class FakeEngine(Engine):
    """See the module. ``before_step`` runs in each `step` that has work, in the engine's thread.

    Prompts get no start token. Without ``max_running`` in ``config``, ``max_waiting``
    bounds all requests that have not finished. ``config`` is the rest of `EngineConfig`.
    """

    def __init__(
        self,
        max_sessions: int = MODEL.max_sessions,
        max_waiting: int = 64,
        session_ttl_s: float = 900.0,
        before_step: Callable[[], object] = lambda: None,
        story: Sequence[int] = STORY,
        pool_class: type[CpuStatePool] = CpuStatePool,
        **config: Any,
    ) -> None:
        ids = itertools.count(1)
        pool = pool_class(StateLayout((), 0, STATE_BYTES, STATE_BYTES), max_sessions)
        self._before_step, self._runner = before_step, FakeRunner(pool, story)
        if "max_running" not in config:
            config, max_waiting = {"max_running": max_waiting, **config}, 0
        limits = {
            "new_id": lambda: f"sess_{next(ids):032x}",
            "max_waiting": max_waiting,
            "session_ttl_s": session_ttl_s,
            **config,
        }
        super().__init__(
            ModelConfig(vocab_size=ByteTokenizer.vocab_size, bos_token_id=EOS, eos_token_id=EOS),
            cast(Tokenizer, ByteTokenizer()),
            pool,
            self._runner,
            EngineConfig(**limits),
        )

    def submit(self, request: Request, now: float, start: SessionValue | None = None) -> None:
        super().submit(replace(request, start=False), now, start)

    def step(self, now: float) -> list[Event]:
        if self.has_work():
            self._before_step()
        events = super().step(now)
        if self._runner.fault is not None:
            raise self._runner.fault
        return events


@dataclass(frozen=True)
class FakeDraw:
    """What `FakeRuntime.draw` was asked for."""

    params: SamplingParams


class Hashed(NamedTuple):
    """The state that `FakeRuntime` keeps: a hash of all tokens so far, and how many there were."""

    hash: int = 0
    count: int = 0

    def after(self, tokens: Iterable[int]) -> Hashed:
        hash, count = self
        for token in tokens:
            hash, count = (hash * 31 + token + 1) % (1 << 40), count + 1
        return Hashed(hash, count)

    def token(
        self,
        params: SamplingParams,
        vocab_size: int,
        allowed: npt.NDArray[np.uint32] | None = None,
    ) -> int:
        """What is drawn next."""
        seed, ids = params.seed if params.temperature else 0, allowed_ids(allowed, vocab_size)
        return ids[hash((*self, seed)) % len(ids)]


class FakeRuntime:
    """A stand-in for `model.native.runtime.Runtime`: the next token is a hash of all before it.

    So a step that feeds a wrong token, slot or position is seen, and any cut of a
    text gives the same. A state of all ones is not finite.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.calls: list[list[int]] = []
        #: Of the last run: the text before each draw, by row.
        self.before: list[list[Hashed]] = []

    def draw(self, *, penalty_window: int, **params: Any) -> FakeDraw:
        return FakeDraw(SamplingParams(**params))

    def run(
        self,
        pool: npt.NDArray[np.uint8],
        slots: list[int],
        positions: list[int],
        tokens: list[Sequence[int]],
        draws: list[FakeDraw | None],
        recents: list[Sequence[int] | None] | None = None,
        allowed: list[Sequence[Mask | None] | None] | None = None,
        num_draws: list[int] | None = None,
        sources: list[npt.NDArray[np.uint8] | None] | None = None,
        targets: list[npt.NDArray[np.uint8] | None] | None = None,
    ) -> list[list[int]]:
        assert len(set(slots)) == len(slots), slots
        self.calls.append([len(row) for row in tokens])
        self.before = []
        nothing = [None] * len(slots)
        counts = num_draws or [1] * len(slots)
        columns = positions, tokens, draws, recents or nothing, allowed or nothing, counts
        drawn = []
        for row, slot in enumerate(slots):
            source, target = sources and sources[row], targets and targets[row]
            state = _state(pool[slot], source)
            drawn.append(self._row(state.view(np.int64), *(column[row] for column in columns)))
            _put(state, pool[slot], source if target is None else target)
        return drawn

    def _row(
        self,
        state: npt.NDArray[np.int64],
        position: int,
        tokens: Sequence[int],
        draw: FakeDraw | None,
        recent: Sequence[int] | None,
        allowed: Sequence[Mask | None] | None,
        num_draws: int,
    ) -> list[int]:
        before: list[Hashed] = []
        self.before.append(before)
        if state[0] == -1:
            return [] if draw is None else [-2] * num_draws
        assert tokens
        assert state[1] == position, (state[1], position)
        assert all(0 <= token < self.vocab_size for token in tokens), tokens
        hashed, drawn = Hashed(int(state[0]), int(state[1])), []
        first = len(tokens) - num_draws
        for place, token in enumerate(tokens):
            hashed = hashed.after([token])
            if draw is not None and place >= first:
                mask = None if allowed is None else allowed[place - first]
                before.append(hashed)
                drawn.append(hashed.token(draw.params, self.vocab_size, mask))
        state[:2] = hashed
        if draw is not None:
            assert (recent is not None) == has_penalty(draw.params)
            assert recent is None or list(recent)[-len(tokens) :] == list(tokens)[-len(recent) :]
        return drawn


def _state(
    block: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8] | None
) -> npt.NDArray[np.uint8]:
    """A copy of the state whose past is in ``block``, and the rest in ``source`` if given."""
    state = block.copy()
    if source is not None:
        state[: len(source)] = source
    return state


def _put(
    state: npt.NDArray[np.uint8],
    block: npt.NDArray[np.uint8],
    target: npt.NDArray[np.uint8] | None,
) -> None:
    """Writes the past to ``block`` and the rest to ``target``, or there as well."""
    fixed = state[:0] if target is None else target
    fixed[:] = state[: len(fixed)]
    block[len(fixed) :] = state[len(fixed) :]


class OnGrid:
    """A runner of which prompts must be cut on a grid."""

    grid = (64, 16)

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.prepare, self.score, self.embed = runner.prepare, runner.score, runner.embed

    def run(self, feeds: Sequence[Feed]) -> list[RowOutput]:
        for feed in feeds:
            size = len(feed.tokens)
            assert size == 1 or (size in self.grid and feed.position % size == 0), feed
        return self._runner.run(feeds)
