"""The engine: requests in, events out, one step at a time.

Sans-IO: no thread, socket, file or clock of its own; ``now`` is an argument. One
thread owns it. `step` does one round for all requests. What must outlive the
process comes out as records (`take_records`), in the order in which it happened;
the events of a step must not be sent before its records are safe.
"""

from __future__ import annotations

import sys

from model.architectures.config import Config
from model.architectures.hybrid import longest_text
from model.tokenizer import Tokenizer
from server.engine.drafts import Drafter
from server.engine.kept import Keeper, OwnedSessions
from server.engine.limits import EngineConfig, check_length, check_request
from server.engine.prefixes import Evicted, Prefix, PrefixCache, Prompts
from server.engine.request import Live
from server.engine.runner import Runner, StatePool
from server.engine.scheduler import Row, Scheduler
from server.engine.session import Accepted, Progress, Record, Session, SessionValue, no_matchers
from server.engine.step import Executor, GrammarTurns, OutputProcessor
from server.engine.tables import RequestTable, SessionTable
from server.engine.text import TokenArray
from server.engine.types import EngineStats, Event, Failed, Request, SessionInfo, Started
from server.errors import InvalidRequest, QueueFull, SessionAttached

__all__ = ["Engine", "EngineConfig"]


class Engine:
    """Continuous batching over sessions of constant size. Owned by one thread."""

    def __init__(
        self,
        model_config: Config,
        tokenizer: Tokenizer,
        pool: StatePool,
        runner: Runner,
        config: EngineConfig,
    ) -> None:
        self.tokenizer = tokenizer
        self._model_config, self._config = model_config, config
        self._pool, self._drafter = pool, config.drafter
        self._has_drafts = False  # whether a running request may have some
        self._longest = longest_text(model_config)
        eos = tuple(dict.fromkeys((model_config.eos_token_id, *tokenizer.eos_token_ids)))
        matchers = config.matchers or no_matchers
        self._prefixes = None
        if config.max_prefixes:
            self._prefixes = PrefixCache(
                config.max_prefixes,
                config.max_evicted_prefixes,
                config.max_prefix_bytes,
                config.min_prefix_uses,
            )
        self._scheduler: Scheduler[Live] = Scheduler(
            *(runner.grid, config.max_running, config.max_waiting),
            max_drafts=0 if self._drafter is None else self._drafter.max_drafts,
        )
        self._sessions = SessionTable(pool, config.max_asleep, config.session_ttl_s)
        self._requests = RequestTable(
            *(self._scheduler, self._sessions, runner, eos),
            *(self._longest, config.max_request_bytes),
        )
        self._keeper = Keeper(self._sessions, self._requests, tokenizer, config, self._longest)
        #: What owners ask of their sessions.
        self.kept = OwnedSessions(
            *(self._sessions, self._requests, self._keeper),
            *(model_config.vocab_size, pool.layout),
        )
        self._prompts = Prompts(self._sessions, self._prefixes, runner.grid)
        self._grammar_turns = GrammarTurns()
        self._executor = Executor(
            *(runner, pool, self._scheduler, self._requests, matchers),
            *(model_config.vocab_size, config.drafter),
        )
        self._processor = OutputProcessor(
            self._requests, self._sessions, self._keeper, self._prompts, pool, matchers
        )

    # A step

    def step(self, now: float) -> list[Event]:
        """One round: ends and admits requests, then runs a row of each and takes its tokens."""
        self.expire(now)
        for live in list(self._requests.cancelled):
            self._requests.finish(live, "cancelled", now)
        self._keeper.trim()
        self._admit(now)
        rows = self._schedule()
        self._processor.process(self._executor.run(rows, now) if rows else [], now)
        return self._requests.take_events()

    def _admit(self, now: float) -> None:
        """Starts those that wait, as far as slots reach; long runners make room for them."""
        while (live := self._scheduler.next_waiting()) is not None:
            if not self._can_run(live):
                preemptible = self._scheduler.find_preemptible()
                if preemptible is None:
                    return
                self._requests.preempt(preemptible)
                continue
            self._requests.start(live)
            if not live.started:
                self._begin(live)
            if not live.session.num_unfed:
                self._processor.prompt_is_fed(live, now)

    def _can_run(self, live: Live) -> bool:
        room = len(self._scheduler.running) < self._scheduler.max_running
        return room and self._sessions.wake(live.session)

    def _begin(self, live: Live) -> None:
        live.started = True
        session = live.session
        place = (live.length, session.epoch, session.seq)
        started = Started(live.request.request_id, session.id, *place, live.start)
        self._requests.events.append(started)
        self._prompts.skip_cached(live)

    def _schedule(self) -> list[Row[Live]]:
        """The rows of this step, with what is drafted for them."""
        if self._drafter is not None:
            self._draft(self._drafter)
        plan = self._scheduler.plan()
        return self._grammar_turns.choose(plan, self._scheduler.running) if plan else plan

    def _draft(self, drafter: Drafter) -> None:
        running = self._scheduler.running
        if len(running) > drafter.max_streams:
            if self._has_drafts:
                for live in running:
                    live.drafts, live.num_drafts = (), 0
            self._has_drafts = False
            return
        self._has_drafts = True
        for live in running:
            limit = live.max_drafts(drafter.max_drafts)
            live.drafts, live.num_drafts = (), 0
            if limit > 0:
                live.drafts, live.num_drafts, source = drafter.propose(live, limit, len(running))
                live.drafts_of_model = source == "model"

    def has_work(self) -> bool:
        return bool(
            self._scheduler.running
            or self._requests.cancelled
            or self._requests.events
            or self._scheduler.next_waiting()
        )

    @property
    def longest_row(self) -> int:
        """The greatest number of tokens that one request has got in the last step."""
        return self._processor.longest

    # Requests

    def submit(self, request: Request, now: float, start: SessionValue | None = None) -> None:
        """Accepts a request; its events come out of `step`.

        A new session begins as ``start`` or the request's prefix says, and else empty. Raises
        `InvalidRequest`, `ContextExceeded`, `SessionNotFound`, `PrefixNotFound`, `SessionBusy`,
        `CapacityExhausted` or `QueueFull`, and then nothing has changed.
        """
        self.expire(now)
        self._check_new(request.request_id)
        check_request(request, self._model_config.vocab_size, self._config)
        if not self._scheduler.has_room:
            limit = self._config.max_waiting
            raise QueueFull(f"{limit} requests are waiting; try again later")
        self._requests.check_room(request)
        session = None
        if request.session is not None:
            session = self._sessions.find(request.session, request.owner)
        elif request.prefix is not None:
            start = self._prompts.start_of(request.owner, request.prefix)
        if self._longest is not None:
            begun = start if session is None else session
            length = 0 if begun is None else begun.length
            length += len(self._start_token(request, begun))
            check_length(length, request, self._longest)
        if session is None:
            session = self._keeper.open(request.owner, request.keep, now, start)
        live = self._requests.new(Progress(request, session.length), session)
        self._sessions.begin(session, live)
        self._extend(live)
        self._requests.add(live)

    def _check_new(self, request_id: str) -> None:
        if request_id in self._requests:
            raise InvalidRequest("request_id: is that of a running request", "request_id")

    def _start_token(
        self, request: Request, begun: Session | SessionValue | None
    ) -> tuple[int, ...]:
        """The token that the text of ``request`` begins with, where it has ``begun`` with none.

        A state that was tuned takes its place.
        """
        if begun is not None and begun.length:
            return ()
        wanted = request.start and (begun is None or begun.origin is None)
        return (self._model_config.bos_token_id,) if wanted or not request.tokens else ()

    def _extend(self, live: Live) -> None:
        """What the request adds to the text: a start token if asked, and its own tokens."""
        request, session = live.request, live.session
        live.start = self._start_token(request, session)
        tokens = TokenArray.joined(live.start, request.tokens)
        accepted = Accepted(request, tokens, session.length, session.seq)
        self._sessions.record(session, accepted)
        self._prompts.expect(live, tokens)
        session.log_index += 1
        session.begin(request, tokens)

    def cancel(self, request_id: str) -> None:
        """Ends a request in the next step. No effect on one that is over."""
        if (live := self._requests.get(request_id)) is not None:
            self._requests.cancel(live)

    def park(self, request_id: str) -> None:
        """Parks a request; its slot is free for another."""
        if (live := self._requests.get(request_id)) is not None:
            self._requests.park(live)

    def unpark(self, request_id: str) -> None:
        """Lets a parked request continue, when it is its turn again."""
        if (live := self._requests.get(request_id)) is not None:
            self._requests.unpark(live)

    def detach(self, request_id: str) -> None:
        """The request has lost its reader: a kept session continues for a while, then parks."""
        if (live := self._requests.get(request_id)) is None:
            return
        if not live.session.keep:
            self._requests.cancel(live)
            return
        live.detached = True
        if not live.request.unattended:
            live.max_generated = live.num_generated + self._config.max_detached_tokens
        self._requests.unpark(live)

    def attach(self, session: str, owner: str, request_id: str, take_over: bool) -> SessionInfo:
        """What the session runs is called ``request_id`` from now on, and is parked.

        So that the caller can read what it has missed and then `unpark` it. An
        idle session is left as it is. Raises `SessionNotFound`, and
        `SessionAttached` where the request has a reader already; with
        ``take_over`` that one gets `Failed` instead.
        """
        found = self._sessions.find(session, owner)
        live = self._sessions.request_of(found)
        if live is not None:
            self._check_new(request_id)
            if not live.detached:
                if not take_over:
                    raise SessionAttached
                self._requests.events.append(Failed(live.request.request_id, SessionAttached()))
            self._requests.park(live)
            self._requests.rename(live, request_id)
            live.detached, live.max_generated = False, sys.maxsize
            self._sessions.stir(found)
        return self.kept.of(found, found.last_used)

    def continue_unattended(self, session: str, owner: str) -> None:
        """Continues what a restored session runs, without a reader. Raises `SessionNotFound`."""
        live = self._sessions.request_of(self._sessions.find(session, owner))
        if live is not None and live.detached:
            self.detach(live.request.request_id)

    def cancel_session(self, session: str, owner: str) -> None:
        """Ends what the session runs, if anything. Raises `SessionNotFound`."""
        live = self._sessions.request_of(self._sessions.find(session, owner))
        if live is not None:
            self._requests.cancel(live)

    def num_running(self, owner: str) -> int:
        """Requests of an owner that compute or wait to; those that are parked for a reader count.

        What is parked for lack of a reader does not: it takes `num_starting` to continue.
        """
        return sum(
            live.request.num_branches
            for live in self._requests
            if live.owner == owner and not (live.parked and live.detached)
        )

    def num_starting(self, session: str, owner: str) -> int:
        """By how many `num_running` grows when what the session runs continues."""
        live = self._sessions.request_of(self._sessions.find(session, owner))
        return int(live is not None and live.parked and live.detached)

    def expire(self, now: float) -> None:
        """Evicts the idle sessions whose time is over."""
        self._keeper.expire(now)

    def take_records(self) -> list[Record]:
        """What has happened to kept sessions since the last call, in order."""
        records, self._sessions.records = self._sessions.records, []
        return records

    def insert_prefix(self, owner: str, prefix: Prefix) -> None:
        """Takes a prompt's state from the second tier into the prefix cache."""
        if self._prefixes is not None:
            self._prefixes.insert(owner, prefix, is_stored=True)

    def take_evicted_prefixes(self) -> list[Evicted]:
        """What the prefix cache has offered and evicted since the last call."""
        return [] if self._prefixes is None else self._prefixes.take_evicted()

    def most_useful_prefixes(self) -> list[Evicted]:
        """See `PrefixCache.most_useful`."""
        return [] if self._prefixes is None else self._prefixes.most_useful()

    def next_expiry(self) -> float | None:
        """When `expire` has something to do, on the clock of ``now``."""
        return self._sessions.next_expiry()

    # Counts

    def take_usage(self) -> dict[str, int]:
        """Tokens computed for each owner since the last call."""
        usage, self._processor.usage = self._processor.usage, {}
        return usage

    def take_freed_bytes(self) -> int:
        """Of the requests that have ended since the last call: see `Request.num_bytes`."""
        freed, self._requests.num_freed_bytes = self._requests.num_freed_bytes, 0
        return freed

    def stats(self) -> EngineStats:
        prefixes = self._prefixes
        return EngineStats(
            max_sessions=self._pool.num_slots,
            held_slots=self._pool.num_held,
            num_sessions=len(self._sessions),
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            state_bytes_per_session=self._pool.state_bytes,
            prompt_tokens_total=self._requests.num_prompt_tokens,
            completion_tokens_total=self._processor.num_generated,
            expired_sessions_total=self._keeper.num_expired,
            num_asleep=self._sessions.num_asleep,
            num_parked=sum(live.parked for live in self._requests),
            evicted_sessions_total=self._keeper.num_evicted,
            preemptions_total=self._requests.num_preempted,
            prefix_entries=prefixes.num_entries if prefixes else 0,
            prefix_hits_total=prefixes.num_hits if prefixes else 0,
            prefix_misses_total=prefixes.num_misses if prefixes else 0,
            prefix_saved_tokens_total=prefixes.saved_tokens_total if prefixes else 0,
            accepted_drafts_total=self._processor.num_accepted,
            rejected_drafts_total=self._processor.num_rejected,
            accepted_model_drafts_total=self._processor.num_accepted_of_model,
            rejected_model_drafts_total=self._processor.num_rejected_of_model,
        )
