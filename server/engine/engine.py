"""The engine: requests in, events out, one step at a time.

Sans-IO: no thread, socket or clock of its own; ``now`` is an argument. One
thread owns it. `submit` checks a request and takes its slot at once, so that a
full server says so before any work; `step` does one round for all requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from model.config import ModelConfig
from model.tokenizer import Tokenizer
from server.engine.detokenizer import Detokenizer
from server.engine.errors import InvalidRequest, QueueFull
from server.engine.lifecycle import Phase, check_move
from server.engine.live import Live
from server.engine.runner import NOT_FINITE, Feed, Runner
from server.engine.sampling import check_params
from server.engine.scheduler import Scheduler
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

    new_id: Callable[[], str]
    max_running: int = 256
    max_waiting: int = 1024
    session_ttl_s: float = 900.0


class Engine:
    """Continuous batching over sessions of constant size."""

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer,
        pool: StatePool,
        runner: Runner,
        config: EngineConfig,
    ) -> None:
        self.tokenizer = tokenizer
        self._model_config, self._config = model_config, config
        self._pool, self._runner = pool, runner
        self._sessions = SessionTable(pool, config.session_ttl_s)
        self._scheduler: Scheduler[Live] = Scheduler(
            runner.grid, config.max_running, config.max_waiting
        )
        self._live: dict[str, Live] = {}
        self._cancelled: dict[str, Live] = {}
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
        plan = self._scheduler.plan()
        if plan:
            self._run(plan, events, now)
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
            state_bytes_per_session=self._pool.layout.num_bytes,
            prompt_tokens_total=self._num_prompt,
            completion_tokens_total=self._num_completion,
            expired_sessions_total=self._sessions.num_expired,
        )

    # The parts of a step

    def _run(self, plan: list[tuple[Live, int]], events: list[Event], now: float) -> None:
        """One call of the runner for all rows, then what came of each."""
        feeds = [self._feed(live, count) for live, count in plan]
        tokens = self._runner.run(feeds)
        for (live, count), token in zip(plan, tokens, strict=True):
            session = live.session
            session.position += count
            session.pending = None
            if live.phase is Phase.PREFILL:
                live.num_fed += count
                live.num_unfed -= count
                if live.num_unfed:
                    continue
                if live.draw is None:
                    events.append(self._finish(live, None, now))
                    continue
                self._move(live, Phase.DECODE)
                live.num_unfed = 1  # from here on, the token sampled last
            if token >= 0:
                self._generated(live, token, events, now)
            else:
                assert token == NOT_FINITE, token
                events.append(self._finish(live, "error", now, "the model's output is not finite"))

    def _feed(self, live: Live, count: int) -> Feed:
        """The row of ``live``; the tokens of a prompt become recent ones."""
        session = live.session
        if live.phase is Phase.DECODE:
            assert session.pending is not None
            return Feed(session.slot, session.position, (session.pending,), live.draw, live.recent)
        tokens = live.tokens[live.num_fed : live.num_fed + count]
        session.recent.extend(tokens if session.pending is None else tokens[1:])
        draw = live.draw if count == live.num_unfed else None
        return Feed(session.slot, session.position, tokens, draw, live.recent)

    def _generated(self, live: Live, token: int, events: list[Event], now: float) -> None:
        session, stops, met = live.session, live.stop_strings, False
        text = session.detokenizer.push(token)
        if stops is not None:
            text, met = stops.push(text)
        position = session.position
        session.hold(token)
        session.seq += 1
        live.num_generated += 1
        self._num_completion += 1
        events.append(TokenEvent(live.request.request_id, session.seq, position, token, text))
        if met or token in live.ends:
            events.append(self._finish(live, "stop", now, drop_held=met))
        elif live.num_generated == live.max_tokens:
            events.append(self._finish(live, "length", now))

    def _finish(
        self,
        live: Live,
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
        text = live.stop_strings.flush() if live.stop_strings and not drop_held else ""
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

    def _move(self, live: Live, phase: Phase) -> None:
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

    def _prepare(self, request: Request, session: Session) -> Live:
        """What the request feeds: the token still pending, a start token if asked, its own."""
        pending = () if session.pending is None else (session.pending,)
        start: tuple[int, ...] = ()
        if session.length == 0 and (request.start or not request.tokens):
            start = (self._model_config.bos_token_id,)
        if request.tokens:
            session.detokenizer.flush()  # an unfinished character ends where new text begins
        tokens = (*pending, *start, *request.tokens)
        if request.sampling is None:
            return Live.feeding(request, session, tokens)
        draw = self._runner.prepare(request.sampling)
        return Live.generating(request, session, tokens, draw, self._model_config.eos_token_id)

    def _info(self, session: Session, now: float) -> SessionInfo:
        idle_s = 0.0 if session.running else now - session.last_used
        return SessionInfo(
            session.id,
            session.length,
            session.seq,
            session.running is not None,
            idle_s,
            self._pool.layout.num_bytes,
        )
