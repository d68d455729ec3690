"""The engine: requests in, events out, one step at a time.

Sans-IO: no thread, socket or clock of its own; ``now`` is an argument. One
thread owns it. `submit` checks a request and takes its slot at once, so that a
full server says so before any work; `step` does one round for all requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model.checkpoint import Checkpoint
from model.state import StateLayout
from server.engine.detokenizer import Detokenizer, StopStrings
from server.engine.errors import InvalidRequest, QueueFull
from server.engine.lifecycle import Phase, check_move
from server.engine.runner import Runner
from server.engine.sampler import Draw, check_params, sample
from server.engine.scheduler import Plan, Scheduler
from server.engine.sessions import Session, SessionTable
from server.engine.state_pool import StatePool
from server.engine.types import (
    EngineStats,
    Event,
    Finished,
    FinishReason,
    Request,
    SessionInfo,
    Started,
    TokenEvent,
    Usage,
)


@dataclass(frozen=True)
class EngineConfig:
    """Limits, all fixed at start. ``new_id`` names sessions: unguessable in production."""

    max_sessions: int
    new_id: Callable[[], str]
    chunk_sizes: tuple[int, ...] = (64, 16)
    max_running: int = 256
    max_waiting: int = 1024
    session_ttl_s: float = 900.0


@dataclass(eq=False, slots=True)
class _Live:
    """A request between `submit` and its `Finished`."""

    request: Request
    session: Session
    tokens: tuple[int, ...]  # to feed: the session's pending token, then the prompt
    held: tuple[int, ...]  # the prompt's last token, if nothing is to be generated after it
    length: int  # of the session before this request
    stop_strings: StopStrings
    phase: Phase = Phase.WAITING
    num_fed: int = 0
    num_generated: int = 0

    @property
    def position(self) -> int:
        return self.session.position

    @property
    def num_unfed(self) -> int:
        return len(self.tokens) - self.num_fed if self.phase is not Phase.DECODE else 1


class Engine:
    """Continuous batching over sessions of constant size."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        self.tokenizer = checkpoint.tokenizer
        self._model_config = checkpoint.config
        self._config = config
        self._layout = StateLayout.of(checkpoint.config)
        device = checkpoint.model.head_weight.device
        self._pool = StatePool(self._layout, config.max_sessions, device)
        self._runner = Runner(checkpoint.model, self._pool, config.chunk_sizes)
        self._sessions = SessionTable(self._pool, config.session_ttl_s)
        self._scheduler: Scheduler[_Live] = Scheduler(
            config.chunk_sizes, config.max_running, config.max_waiting
        )
        self._live: dict[str, _Live] = {}
        self._cancelled: dict[str, _Live] = {}
        self._num_prompt = self._num_completion = 0

    # Commands

    def submit(self, request: Request, now: float) -> None:
        """Accepts a request; its events come out of `step`.

        Raises `InvalidRequest`, `SessionNotFound`, `SessionBusy`,
        `CapacityExhausted` or `QueueFull`, and then nothing has changed.
        """
        self.expire(now)
        self._check(request)
        if not self._scheduler.has_room:
            raise QueueFull(f"{self._config.max_waiting} requests are waiting; try again later")
        if request.session is None:
            session = self._open(request.owner, request.keep, now)
        else:
            session = self._sessions.find(request.session, request.owner)
        self._sessions.begin(session, request.request_id)
        live = self._prepare(request, session)
        self._live[request.request_id] = live
        self._scheduler.add(live)

    def cancel(self, request_id: str) -> None:
        """Ends a request in the next step; one that is over already is none of its business."""
        if request_id in self._live:
            self._cancelled[request_id] = self._live[request_id]

    def create_session(self, owner: str, now: float) -> SessionInfo:
        """A kept, empty session. Raises `CapacityExhausted`."""
        self.expire(now)
        return self._info(self._open(owner, True, now), now)

    def session_info(self, session: str, owner: str, now: float) -> SessionInfo:
        """Raises `SessionNotFound`."""
        return self._info(self._sessions.find(session, owner), now)

    def delete_session(self, session: str, owner: str) -> None:
        """Frees the slot, at once or when the running request has ended, cancelled.

        Raises `SessionNotFound`.
        """
        found = self._sessions.find(session, owner)
        found.keep = False
        if found.running is None:
            self._sessions.close(found)
        else:
            self.cancel(found.running)

    def expire(self, now: float) -> None:
        """Closes the idle sessions whose time is over."""
        self._sessions.expire(now)

    # Progress

    def step(self, now: float) -> list[Event]:
        """One round: cancels, admissions, then one token or one chunk for each running request."""
        self.expire(now)
        cancelled = list(self._cancelled.values())
        events: list[Event] = [self._finish(live, "cancelled", now) for live in cancelled]
        for live in self._scheduler.admit():
            self._move(live, Phase.PREFILL)
            events.append(Started(live.request.request_id, live.session.id, live.length))
            if not live.tokens:
                events.append(self._finish(live, None, now))
        self._run(self._scheduler.plan(), events, now)
        return events

    def has_work(self) -> bool:
        return bool(self._live)

    def next_expiry(self) -> float | None:
        """When `expire` has something to do, on the clock of ``now``."""
        return self._sessions.next_expiry()

    def stats(self) -> EngineStats:
        return EngineStats(
            max_sessions=self._pool.num_slots,
            held_slots=self._pool.num_held,
            num_sessions=len(self._sessions),
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            state_bytes_per_session=self._layout.num_bytes,
            prompt_tokens_total=self._num_prompt,
            completion_tokens_total=self._num_completion,
            expired_sessions_total=self._sessions.num_expired,
        )

    # The parts of a step

    def _run(self, plan: Plan[_Live], events: list[Event], now: float) -> None:
        ready: list[tuple[_Live, Tensor]] = []
        if plan.chunks:
            parts = [live.tokens[live.num_fed :][: plan.chunk_size] for live in plan.chunks]
            rows = self._runner.prefill(*_where(plan.chunks), parts)
            for live, part, logits in zip(plan.chunks, parts, rows, strict=True):
                self._fed(live, part)
                if live.num_fed == len(live.tokens):
                    ready.append((live, logits))
        if plan.steps:
            tokens = [self._next_token(live) for live in plan.steps]
            rows = self._runner.decode(*_where(plan.steps), tokens)
            for live, token, logits in zip(plan.steps, tokens, rows, strict=True):
                self._fed(live, (token,))
                if live.num_fed == len(live.tokens):
                    ready.append((live, logits))
        self._advance(ready, events, now)

    def _next_token(self, live: _Live) -> int:
        if live.phase is Phase.DECODE:
            assert live.session.pending is not None
            return live.session.pending
        return live.tokens[live.num_fed]

    def _fed(self, live: _Live, tokens: tuple[int, ...]) -> None:
        """Bookkeeping after the state has seen ``tokens``."""
        session = live.session
        if live.phase is Phase.PREFILL:
            live.num_fed += len(tokens)
            session.recent.extend(tokens if session.pending is None else tokens[1:])
        session.position += len(tokens)
        session.pending = None

    def _advance(self, ready: list[tuple[_Live, Tensor]], events: list[Event], now: float) -> None:
        """Samples for the requests whose prompts are fed, and ends those that only fed."""
        sampling = []
        for live, logits in ready:
            if live.request.sampling is None:
                events.append(self._finish(live, None, now))
            else:
                sampling.append((live, logits))
        if not sampling:
            return
        draws = [
            Draw(live.request.sampling, live.session.position, live.session.recent)
            for live, _ in sampling
            if live.request.sampling is not None
        ]
        logits = torch.stack([row for _, row in sampling])
        # A model's vocabulary may be padded beyond the tokenizer's: those ids stand for nothing.
        tokens = sample(logits[:, : self.tokenizer.vocab_size], draws)
        for (live, _), token in zip(sampling, tokens, strict=True):
            if live.phase is Phase.PREFILL:
                self._move(live, Phase.DECODE)
            if token is None:
                events.append(self._finish(live, "error", now, "the model's output is not finite"))
            else:
                self._generated(live, token, events, now)

    def _generated(self, live: _Live, token: int, events: list[Event], now: float) -> None:
        session, params = live.session, live.request.sampling
        assert params is not None
        text, met = live.stop_strings.push(session.detokenizer.push(token))
        position = session.length
        session.hold(token)
        session.seq += 1
        live.num_generated += 1
        self._num_completion += 1
        events.append(TokenEvent(live.request.request_id, session.seq, position, token, text))
        ended = token == self._model_config.eos_token_id and not params.ignore_eos
        if met or ended or token in params.stop_token_ids:
            events.append(self._finish(live, "stop", now, drop_held=met))
        elif live.num_generated == params.max_tokens:
            events.append(self._finish(live, "length", now))

    def _finish(
        self,
        live: _Live,
        reason: FinishReason | None,
        now: float,
        error: str | None = None,
        drop_held: bool = False,
    ) -> Finished:
        """Takes the request out, wherever it is, and lets its session go idle or close.

        A session's text always ends with a pending token, which the state has
        not seen: feeding it is what gives the next request its first logits.
        """
        request, session = live.request, live.session
        self._move(live, Phase.FINISHED)
        self._scheduler.remove(live)
        del self._live[request.request_id]
        self._cancelled.pop(request.request_id, None)
        if reason == "error":
            session.keep = False  # its state cannot be trusted
        text = "" if drop_held else live.stop_strings.flush()
        if not session.keep and not drop_held:
            text += session.detokenizer.flush()
        if request.sampling is not None:
            session.seq += 1
        unfed = (*live.tokens[live.num_fed :], *live.held)
        if unfed and (reason is None or live.num_fed > 0):
            session.hold(unfed[0])  # also where a cancel came in the middle of a prompt
        prompt_tokens = session.length - live.length - live.num_generated
        self._num_prompt += prompt_tokens
        self._sessions.end(session, now)
        return Finished(
            request.request_id,
            session.id if session.keep else None,
            session.seq,
            session.length,
            text,
            reason,
            Usage(prompt_tokens, live.num_generated),
            error,
        )

    def _move(self, live: _Live, phase: Phase) -> None:
        check_move(live.phase, phase)
        live.phase = phase

    # The parts of a submit

    def _check(self, request: Request) -> None:
        vocab_size = self._model_config.vocab_size
        if request.request_id in self._live:
            raise InvalidRequest("request_id: is that of a running request", "request_id")
        if request.sampling is not None:
            check_params(request.sampling, vocab_size)
        elif not request.tokens:
            raise InvalidRequest("prompt: must not be empty where nothing is generated", "prompt")
        if not all(0 <= token < vocab_size for token in request.tokens):
            raise InvalidRequest(f"prompt: token ids must be in 0..{vocab_size - 1}", "prompt")

    def _open(self, owner: str, keep: bool, now: float) -> Session:
        detokenizer = Detokenizer(self.tokenizer)
        return self._sessions.open(self._config.new_id(), owner, keep, detokenizer, now)

    def _prepare(self, request: Request, session: Session) -> _Live:
        """What the request feeds: the token still pending, a start token if asked, its own."""
        pending = () if session.pending is None else (session.pending,)
        start: tuple[int, ...] = ()
        if session.length == 0 and (request.start or not request.tokens):
            start = (self._model_config.bos_token_id,)
        if request.tokens:
            session.detokenizer.flush()  # an unfinished character ends where new text begins
        stops = request.sampling.stop if request.sampling else ()
        tokens = (*pending, *start, *request.tokens)
        split = len(tokens) if request.sampling else len(tokens) - 1
        return _Live(
            request, session, tokens[:split], tokens[split:], session.length, StopStrings(stops)
        )

    def _info(self, session: Session, now: float) -> SessionInfo:
        idle_s = 0.0 if session.running else now - session.last_used
        return SessionInfo(
            session.id,
            session.length,
            session.seq,
            session.running is not None,
            idle_s,
            self._layout.num_bytes,
        )


def _where(requests: list[_Live]) -> tuple[list[int], list[int]]:
    """Slots and positions."""
    sessions = [live.session for live in requests]
    return [s.slot for s in sessions], [s.position for s in sessions]
