"""The engine: requests in, events out, one step at a time.

Sans-IO: no thread, socket, file or clock of its own; ``now`` is an argument. One
thread owns it. `step` does one round for all requests. What must outlive the
process comes out as records (`take_records`), in the order in which it happened;
the events of a step must not be sent before its records are safe.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from model.config import ModelConfig
from model.tokenizer import Tokenizer
from server.engine.errors import EngineError, InvalidRequest, QueueFull, SessionAttached
from server.engine.keeper import Keeper, KeepingConfig, info_of
from server.engine.lifecycle import Phase
from server.engine.live import Live
from server.engine.prefix_cache import Evicted, PrefixCache
from server.engine.round import Round
from server.engine.runner import Runner
from server.engine.sampling import check_params
from server.engine.scheduler import Scheduler
from server.engine.sessions import Session, SessionTable
from server.engine.state_pool import StatePool
from server.engine.types import EngineStats, Event, Failed, Migrated, Request, SessionInfo
from server.engine.value import Accepted, Past, Progress, Record, SessionValue, StateBlock


@dataclass(frozen=True)
class EngineConfig:
    """Limits, all fixed at start. ``new_id`` names sessions: unguessable in production.

    ``max_asleep`` sessions fit beside the pool. With ``can_evict`` a store takes
    those that have been idle for longest, or for ``session_ttl_s``; otherwise the
    latter are deleted. A kept session is saved every ``save_interval`` tokens, and
    parks ``max_detached_tokens`` after its client has left.
    """

    new_id: Callable[[], str]
    max_running: int = 256
    max_waiting: int = 1024
    max_asleep: int = 0
    session_ttl_s: float = 900.0
    can_evict: bool = False
    save_interval: int = 1024
    max_detached_tokens: int = 4096
    max_prefixes: int = 0
    max_evicted_prefixes: int = 0


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
        self._pool = pool
        self._live: dict[str, Live] = {}
        self._sessions = SessionTable(pool, config.max_asleep, config.session_ttl_s)
        keeping = KeepingConfig(config.new_id, config.can_evict, config.save_interval)
        self._keeper = Keeper(self._sessions, self._live, tokenizer, keeping)
        self._scheduler: Scheduler[Live] = Scheduler(
            runner.grid, config.max_running, config.max_waiting
        )
        self._prefixes = None
        if config.max_prefixes:
            self._prefixes = PrefixCache(config.max_prefixes, config.max_evicted_prefixes)
        self._round = Round(
            runner,
            self._scheduler,
            self._sessions,
            self._keeper,
            self._prefixes,
            self._live,
            model_config.eos_token_id,
        )

    # Requests

    def submit(self, request: Request, now: float) -> None:
        """Accepts a request; its events come out of `step`.

        Raises `InvalidRequest`, `SessionNotFound`, `SessionBusy`,
        `CapacityExhausted` or `QueueFull`, and then nothing has changed.
        """
        self.expire(now)
        self._check(request)
        if not self._scheduler.has_room:
            limit = self._config.max_waiting
            raise QueueFull(f"{limit} requests are waiting; try again later")
        if request.session is None:
            session = self._keeper.open(request.owner, request.keep, now)
        else:
            session = self._sessions.find(request.session, request.owner)
        live = self._round.live_of(Progress(request, session.length), session)
        self._sessions.begin(session, live)
        self._extend(live)
        self._round.start(session)

    def cancel(self, request_id: str) -> None:
        """Ends a request in the next step; one that is over already is none of its business."""
        live = self._live.get(request_id)
        if live is not None:
            self._sessions.stir(live.session)
            self._round.cancelled[live] = None

    def park(self, request_id: str) -> None:
        """Lets a request rest; its slot is for whoever needs it."""
        live = self._live.get(request_id)
        if live is not None and not live.parked:
            self._round.park(live)

    def unpark(self, request_id: str) -> None:
        """Lets a parked request go on, when it is its turn again."""
        live = self._live.get(request_id)
        if live is not None and live.parked:
            live.move(Phase.WAITING)
            self._sessions.stir(live.session)
            self._scheduler.add(live)

    def detach(self, request_id: str) -> None:
        """Nobody reads the request any more: a kept session goes on for a while, then parks."""
        live = self._live.get(request_id)
        if live is None:
            return
        if not live.session.keep:
            self.cancel(request_id)
            return
        live.detached = True
        live.max_generated = live.num_generated + self._config.max_detached_tokens
        self.unpark(request_id)

    def attach(self, session: str, owner: str, request_id: str, take_over: bool) -> SessionInfo:
        """What the session runs is called ``request_id`` from now on, and is parked.

        So that the caller can read what it has missed and then `unpark` it. An
        idle session is left as it is. Raises `SessionNotFound`, and
        `SessionAttached` where the request has a reader already; with
        ``take_over`` that one gets `Failed` instead.
        """
        found = self._sessions.find(session, owner)
        live = found.live
        if live is not None:
            if request_id in self._live:
                raise InvalidRequest("request_id: is that of a running request", "request_id")
            if not live.detached:
                if not take_over:
                    raise SessionAttached
                self._round.events.append(Failed(live.request.request_id, SessionAttached()))
            self.park(live.request.request_id)
            self._live[request_id] = self._live.pop(live.request.request_id)
            live.request = replace(live.request, request_id=request_id)
            live.detached, live.max_generated = False, sys.maxsize
            self._sessions.stir(found)
        return self._info(found, found.last_used)

    def go_on(self, session: str, owner: str) -> None:
        """Lets what a restored session runs go on, without a reader. Raises `SessionNotFound`."""
        live = self._sessions.find(session, owner).live
        if live is not None and live.detached:
            self.detach(live.request.request_id)

    # Sessions

    def create_session(self, owner: str, now: float) -> SessionInfo:
        """A kept, empty session. Raises `CapacityExhausted`."""
        self.expire(now)
        return self._info(self._keeper.open(owner, True, now), now)

    def session_info(self, session: str, owner: str, now: float) -> SessionInfo:
        """Raises `SessionNotFound`."""
        return self._info(self._sessions.find(session, owner), now)

    def cancel_session(self, session: str, owner: str) -> None:
        """Ends what the session runs, if anything. Raises `SessionNotFound`."""
        live = self._sessions.find(session, owner).live
        if live is not None:
            self.cancel(live.request.request_id)

    def delete_session(self, session: str, owner: str) -> None:
        """Forgets the session, at once or when the running request has ended, cancelled.

        Raises `SessionNotFound`.
        """
        found = self._sessions.find(session, owner)
        if found.live is None:
            self._keeper.delete(found)
        else:
            self._keeper.forget(found)
            self.cancel(found.live.request.request_id)

    def value(self, session: str, owner: str) -> SessionValue:
        """The session now, with its own copy of the state. Raises `SessionNotFound`."""
        return self._keeper.value(self._sessions.find(session, owner))

    def fork(
        self, session: str, owner: str, num: int, now: float, past: Past | None = None
    ) -> list[SessionInfo]:
        """Copies of a session, as it is or as it was in the ``past``; they share one state.

        Raises `SessionNotFound`, `CapacityExhausted`, `InvalidRequest`.
        """
        found = self._sessions.find(session, owner)
        copies = self._keeper.fork(past or Past(self._keeper.value(found)), owner, num, now)
        return [self._info(copy, now) for copy in copies]

    def adopt(self, value: SessionValue, owner: str, now: float) -> SessionInfo:
        """A new session that goes on from ``value``.

        Raises `CapacityExhausted`, and `InvalidRequest` where it holds tokens that
        the model does not have.
        """
        pending = () if value.pending is None else (value.pending,)
        tokens = [*value.recent, *pending, *(t for part in value.debt for t in part.tokens)]
        self._check_tokens(tokens, "session")
        (session,) = self._keeper.fork(Past(value), owner, 1, now)
        return self._info(session, now)

    def rewind(self, session: str, owner: str, past: Past, now: float) -> SessionInfo:
        """Puts the session back to its ``past``, in a new epoch.

        Raises `SessionNotFound`, `InvalidRequest`, and `SessionBusy` while it runs
        a request.
        """
        found = self._sessions.find(session, owner)
        return self._info(self._keeper.rewind(found, past, now), now)

    def restore(self, past: Past, now: float) -> SessionInfo:
        """Takes a session back from a store; a request that had not finished is parked.

        Without effect on one that is here. Raises `CapacityExhausted`.
        """
        if past.value.id in self._sessions:
            return self._info(self._sessions.find(past.value.id, past.value.owner), now)
        session, progress = self._keeper.restore(past, now)
        if progress is not None:
            live = session.live = self._round.live_of(progress, session)
            live.phase, live.detached, live.started = Phase.PARKED, True, True
            live.scores = None  # those of its beginning are lost
            self._live[progress.request.request_id] = live
        return self._info(session, now)

    def expire(self, now: float) -> None:
        """Lets the idle sessions go whose time is over."""
        self._keeper.expire(now)

    def retire(self, max_sessions: int) -> int:
        """Saves kept sessions and lets them go, those that run first; returns how many are left.

        The readers of what they run get `Migrated`.
        """
        kept = sorted((s for s in self._sessions if s.keep), key=lambda s: s.live is None)
        for session in kept[:max_sessions]:
            if (live := session.live) is not None:
                request_id = live.request.request_id
                self.park(request_id)
                self._round.cancelled.pop(live, None)
                place = (session.epoch, session.seq, session.length)
                self._round.events.append(Migrated(request_id, session.id, *place))
            self._keeper.evict(session)
        return max(0, len(kept) - max_sessions)

    def discard_kept(self, error: EngineError) -> None:
        """Forgets every kept session, as if the process had died: the store has not followed.

        What it has of them is what they are. Readers see ``error``.
        """
        self._keeper.take_records()
        for session in self._sessions:
            if session.keep:
                if session.live is not None:
                    self._round.fail(session.live, error)
                self._sessions.close(session)

    def take_records(self) -> list[Record]:
        """What has happened to kept sessions since the last call, in order."""
        return self._keeper.take_records()

    def insert_prefix(self, owner: str, tokens: tuple[int, ...], block: StateBlock) -> None:
        """Takes the state after ``tokens`` into the prefix cache."""
        if self._prefixes is not None:
            self._prefixes.insert(owner, tokens, block)

    def take_usage(self) -> dict[str, int]:
        """Tokens computed for each owner since the last call."""
        usage, self._round.usage = self._round.usage, Counter()
        return usage

    def num_running(self, owner: str) -> int:
        """Requests of an owner that compute or wait to; parked ones do not count."""
        return sum(
            live.request.num_choices
            for live in self._live.values()
            if live.owner == owner and not live.parked
        )

    def take_evicted_prefixes(self) -> list[Evicted]:
        """What the prefix cache has put out since the last call."""
        return [] if self._prefixes is None else self._prefixes.take_evicted()

    # Progress

    def step(self, now: float) -> list[Event]:
        """One round: cancels, admissions, then one token or one chunk for each running request."""
        self.expire(now)
        return self._round.play(now)

    def has_work(self) -> bool:
        return bool(
            self._scheduler.running
            or self._round.cancelled
            or self._round.events
            or self._scheduler.next_waiting()
        )

    def next_expiry(self) -> float | None:
        """When `expire` has something to do, on the clock of ``now``."""
        return self._sessions.next_expiry()

    def stats(self) -> EngineStats:
        prefixes = self._prefixes
        return EngineStats(
            max_sessions=self._pool.num_slots,
            held_slots=self._pool.num_held,
            num_sessions=len(self._sessions),
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            state_bytes_per_session=self._pool.layout.num_bytes,
            prompt_tokens_total=self._round.num_prompt,
            completion_tokens_total=self._round.num_completion,
            expired_sessions_total=self._keeper.num_expired,
            num_asleep=self._sessions.num_asleep,
            num_parked=sum(live.parked for live in self._live.values()),
            evicted_sessions_total=self._keeper.num_evicted,
            preemptions_total=self._round.num_preempted,
            prefix_entries=prefixes.num_entries if prefixes else 0,
            prefix_hits_total=prefixes.num_hits if prefixes else 0,
            prefix_misses_total=prefixes.num_misses if prefixes else 0,
            prefix_saved_tokens_total=prefixes.saved_tokens_total if prefixes else 0,
        )

    # The parts of a submit

    def _check(self, request: Request) -> None:
        vocab_size = self._model_config.vocab_size
        if request.request_id in self._live:
            raise InvalidRequest("request_id: is that of a running request", "request_id")
        if request.sampling is not None:
            check_params(request.sampling, vocab_size)
        elif not request.tokens:
            raise InvalidRequest("prompt: must not be empty where nothing is generated", "prompt")
        self._check_tokens(request.tokens, "prompt")
        if request.score and request.sampling is not None:
            raise InvalidRequest("score: is for tokens that are only fed", "score")
        if request.num_choices > 1 and (request.keep or request.session is not None):
            raise InvalidRequest("n: must be 1 for a session that is kept; fork it", "n")

    def _check_tokens(self, tokens: Sequence[int], param: str) -> None:
        vocab_size = self._model_config.vocab_size
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
            raise InvalidRequest(f"{param}: token ids must be in 0..{vocab_size - 1}", param)

    def _extend(self, live: Live) -> None:
        """What the request adds to the text: a start token if asked, and its own tokens."""
        request, session = live.request, live.session
        start: tuple[int, ...] = ()
        if session.length == 0 and (request.start or not request.tokens):
            start = (self._model_config.bos_token_id,)
        if request.tokens:
            session.detokenizer.flush()  # an unfinished character ends where new text begins
        tokens = (*start, *request.tokens)
        self._keeper.record(session, Accepted(request, tokens, session.length, session.seq))
        if session.length == 0:
            self._round.expect(live, tokens)
        session.log_index += 1
        if tokens:
            session.extend(tokens)

    def _info(self, session: Session, now: float) -> SessionInfo:
        return info_of(session, self._pool.layout.num_bytes, now)
