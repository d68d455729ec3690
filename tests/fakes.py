"""An engine without a model, and a native runtime without one.

`FakeEngine` has the interface of `server.engine.engine.Engine`, bytes as tokens.
What it generates depends on the seed and the position alone: a fixed story, read
from a place that the seed chooses. Words in a prompt make it misbehave:
``END`` at its end generates the end-of-text token at once, ``<fail>`` fails the
request, ``<crash>`` the engine.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from server.api.model_info import ModelInfo
from server.engine.errors import (
    CapacityExhausted,
    InvalidRequest,
    QueueFull,
    SessionBusy,
    SessionNotFound,
)
from server.engine.sampling import has_penalty
from server.engine.types import (
    EngineStats,
    Event,
    Finished,
    FinishReason,
    Request,
    SamplingParams,
    SessionInfo,
    Started,
    TokenEvent,
    Usage,
)

EOS = 256
STATE_BYTES = 448_512
STORY = (
    "Once upon a time there was a little fox who lived under an old oak. “Where does the river "
    "go?” she asked the owl. The owl did not know, so the fox packed a piece of bread and walked "
    "beside the water all day long. At the café by the sea she met a crab, who said: “It goes on.” "
    "And so did she.\n\n"
).encode()

MODEL = ModelInfo(
    name="fake",
    digest="0" * 64,
    attention="gated",
    dtype="float32",
    parameters=5_000_000,
    vocab_size=257,
    state_bytes_per_session=STATE_BYTES,
    kv_cache_bytes_per_token=2 * 6 * 4 * 64 * 2,
    max_sessions=16,
    created_s=1_700_000_000,
)


class ByteTokenizer:
    """UTF-8 bytes as ids, and one more for the end of text."""

    vocab_size = 257
    eos_token_id = EOS

    def encode(self, text: str, /) -> list[int]:
        return list(text.encode())


@dataclass(eq=False)
class Session:
    id: str
    owner: str
    keep: bool
    last_used_s: float
    length: int = 0
    seq: int = 0
    running: str | None = None
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )


@dataclass(eq=False)
class Live:
    request: Request
    session: Session
    num_fed: int = 0
    num_generated: int = 0
    started: bool = False
    held: str = ""


class FakeEngine:
    """See the module. ``before_step`` runs in each `step` that has work, in the engine's thread."""

    def __init__(
        self,
        max_sessions: int = MODEL.max_sessions,
        max_waiting: int = 64,
        session_ttl_s: float = 900.0,
        before_step: Callable[[], object] = lambda: None,
    ) -> None:
        self._max_sessions = max_sessions
        self._max_waiting = max_waiting
        self._ttl_s = session_ttl_s
        self._before_step = before_step
        self._sessions: dict[str, Session] = {}
        self._live: dict[str, Live] = {}
        self._cancelled: set[str] = set()
        self._ids = itertools.count(1)
        self._num_prompt = self._num_completion = self._num_expired = 0

    def submit(self, request: Request, now: float) -> None:
        self.expire(now)
        if request.request_id in self._live:
            raise InvalidRequest("request_id: is that of a running request", "request_id")
        if len(self._live) >= self._max_waiting:
            raise QueueFull("too many requests wait")
        if request.session is None:
            session = self._open(request.owner, request.keep, now)
        else:
            session = self._find(request.session, request.owner)
        if session.running is not None:
            raise SessionBusy
        session.running = request.request_id
        self._live[request.request_id] = Live(request, session)

    def cancel(self, request_id: str) -> None:
        if request_id in self._live:
            self._cancelled.add(request_id)

    def create_session(self, owner: str, now: float) -> SessionInfo:
        self.expire(now)
        return self._info(self._open(owner, True, now), now)

    def session_info(self, session: str, owner: str, now: float) -> SessionInfo:
        return self._info(self._find(session, owner), now)

    def delete_session(self, session: str, owner: str) -> None:
        found = self._find(session, owner)
        found.keep = False
        if found.running is None:
            del self._sessions[session]
        else:
            self.cancel(found.running)

    def step(self, now: float) -> list[Event]:
        if not self._live:
            return []
        self._before_step()
        events: list[Event] = []
        for request_id in sorted(self._cancelled):
            self._finish(self._live[request_id], "cancelled", events, now)
        self._cancelled.clear()
        for live in list(self._live.values()):
            self._advance(live, events, now)
        return events

    def has_work(self) -> bool:
        return bool(self._live)

    def next_expiry(self) -> float | None:
        idle = [found.last_used_s for found in self._sessions.values() if found.running is None]
        return min(idle) + self._ttl_s if idle else None

    def expire(self, now: float) -> None:
        for session in list(self._sessions.values()):
            if session.running is None and session.last_used_s + self._ttl_s <= now:
                del self._sessions[session.id]
                self._num_expired += 1

    def stats(self) -> EngineStats:
        return EngineStats(
            max_sessions=self._max_sessions,
            held_slots=len(self._sessions),
            num_sessions=len(self._sessions),
            num_running=len(self._live),
            num_waiting=0,
            state_bytes_per_session=STATE_BYTES,
            prompt_tokens_total=self._num_prompt,
            completion_tokens_total=self._num_completion,
            expired_sessions_total=self._num_expired,
        )

    def _open(self, owner: str, keep: bool, now: float) -> Session:
        if len(self._sessions) >= self._max_sessions:
            raise CapacityExhausted(f"all {self._max_sessions} sessions are in use")
        session = Session(f"sess_{next(self._ids):032x}", owner, keep, now)
        self._sessions[session.id] = session
        return session

    def _find(self, id: str, owner: str) -> Session:
        session = self._sessions.get(id)
        if session is None or session.owner != owner:
            raise SessionNotFound
        return session

    def _advance(self, live: Live, events: list[Event], now: float) -> None:
        """The whole prompt in one step, then one token in each."""
        session, tokens = live.session, live.request.tokens
        if not live.started:
            live.started = True
            events.append(Started(live.request.request_id, session.id, session.length))
            self._feed(live)
            if b"<crash>" in bytes(token for token in tokens if token < EOS):
                raise RuntimeError("asked to crash")
            if b"<fail>" in bytes(token for token in tokens if token < EOS):
                self._finish(live, "error", events, now, "asked to fail")
            elif live.request.sampling is None:
                self._finish(live, None, events, now)
            return
        assert live.request.sampling is not None
        self._generate(live, live.request.sampling, events, now)

    def _feed(self, live: Live) -> None:
        live.num_fed = len(live.request.tokens)
        live.session.length += live.num_fed
        self._num_prompt += live.num_fed

    def _generate(
        self, live: Live, params: SamplingParams, events: list[Event], now: float
    ) -> None:
        session = live.session
        token = STORY[(params.seed * 7 + session.length) % len(STORY)]
        if live.num_generated == 0 and bytes(live.request.tokens[-3:]) == b"END":
            token = EOS
        text = "" if token == EOS else session.decoder.decode(bytes([token]))
        text, met = self._until_stop(live, text, params.stop)
        session.seq += 1
        live.num_generated += 1
        self._num_completion += 1
        events.append(TokenEvent(live.request.request_id, session.seq, session.length, token, text))
        session.length += 1
        if met or token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            self._finish(live, "stop", events, now)
        elif live.num_generated == params.max_tokens:
            self._finish(live, "length", events, now)

    def _until_stop(self, live: Live, text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
        text = live.held + text
        live.held = ""
        for stop in stops:
            if stop in text:
                return text[: text.index(stop)], True
        for size in range(max(map(len, stops), default=1) - 1, 0, -1):
            if any(text and stop.startswith(text[-size:]) for stop in stops):
                live.held = text[-size:]
                return text[:-size], False
        return text, False

    def _finish(
        self,
        live: Live,
        reason: FinishReason | None,
        events: list[Event],
        now: float,
        error: str | None = None,
    ) -> None:
        request, session = live.request, live.session
        del self._live[request.request_id]
        session.running, session.last_used_s = None, now
        if request.sampling is not None:
            session.seq += 1
        keep = session.keep and reason != "error"
        if not keep:
            del self._sessions[session.id]
        usage = Usage(live.num_fed, live.num_generated)
        events.append(
            Finished(
                request.request_id,
                session.id if keep else None,
                session.seq,
                session.length,
                live.held,
                reason,
                usage,
                error,
            )
        )

    def _info(self, session: Session, now: float) -> SessionInfo:
        idle_s = 0.0 if session.running else now - session.last_used_s
        busy = session.running is not None
        return SessionInfo(session.id, session.length, session.seq, busy, idle_s, STATE_BYTES)


@dataclass(frozen=True)
class FakeDraw:
    """What `FakeRuntime.draw` was asked for."""

    params: SamplingParams


class FakeRuntime:
    """A stand-in for `model.ops.cpu.runtime.Runtime`: the next token is a hash of all before it.

    A slot's state is that hash and a count of the tokens, so a step that feeds a
    wrong token, slot or position is seen, and any cut of a text gives the same.
    A state of all ones is not finite.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.calls: list[list[int]] = []

    def draw(self, **params: Any) -> FakeDraw:
        return FakeDraw(SamplingParams(**params))

    def run(
        self,
        pool: npt.NDArray[np.uint8],
        slots: list[int],
        positions: list[int],
        tokens: list[Sequence[int]],
        draws: list[FakeDraw | None],
        recents: list[Sequence[int] | None] | None = None,
    ) -> list[int]:
        assert len(set(slots)) == len(slots), slots
        self.calls.append([len(row) for row in tokens])
        rows = zip(slots, positions, tokens, draws, recents or [None] * len(slots), strict=True)
        return [self._row(pool[row[0]].view(np.int64), *row[1:]) for row in rows]

    def _row(
        self,
        state: npt.NDArray[np.int64],
        position: int,
        tokens: Sequence[int],
        draw: FakeDraw | None,
        recent: Sequence[int] | None,
    ) -> int:
        if state[0] == -1:
            return -1 if draw is None else -2
        assert tokens
        assert state[1] == position, (state[1], position)
        for token in tokens:
            assert 0 <= token < self._vocab_size, token
            state[0] = (int(state[0]) * 31 + token + 1) % (1 << 40)
        state[1] += len(tokens)
        if draw is None:
            return -1
        assert (recent is not None) == has_penalty(draw.params)
        assert recent is None or list(recent)[-len(tokens) :] == list(tokens)[-len(recent) :]
        seed = draw.params.seed if draw.params.temperature else 0
        return hash((int(state[0]), int(state[1]), seed)) % self._vocab_size
