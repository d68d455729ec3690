"""What an engine is made of, and the sessions that it has: made, copied and sent away.

`server.engine.engine` adds the requests that they run.
"""

from __future__ import annotations

from model.architectures.config import Config
from model.tokenizer import Tokenizer
from server.engine.checks import check_tokens
from server.engine.config import EngineConfig
from server.engine.constraint import no_matchers
from server.engine.grammar_turns import GrammarTurns
from server.engine.keeper import Keeper, info_of
from server.engine.live import Live
from server.engine.prefix_cache import Evicted, PrefixCache
from server.engine.prompts import Prompts
from server.engine.round import Round
from server.engine.runner import Runner
from server.engine.scheduler import Scheduler
from server.engine.session import Session
from server.engine.sessions import SessionTable
from server.engine.state_pool import StatePool
from server.engine.types import Failed, Migrated, SessionInfo
from server.engine.value import Past, Record, SessionValue, StateBlock
from server.errors import RequestError, SessionAttached


class Host:
    """The sessions of an engine. Owned by its thread."""

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
        self._pool, self._runner = pool, runner
        eos = (model_config.eos_token_id, *tokenizer.eos_token_ids)
        self._eos_token_ids = tuple(dict.fromkeys(eos))
        self._live: dict[str, Live] = {}
        self._sessions = SessionTable(pool, config.max_asleep, config.session_ttl_s)
        self._keeper = Keeper(self._sessions, self._live, tokenizer, config)
        self._scheduler: Scheduler[Live] = Scheduler(
            runner.grid, config.max_running, config.max_waiting
        )
        self._prefixes = None
        if config.max_prefixes:
            self._prefixes = PrefixCache(config.max_prefixes, config.max_evicted_prefixes)
        self._prompts = Prompts(self._sessions, self._prefixes, runner.grid)
        self._round = Round(
            runner,
            self._scheduler,
            self._sessions,
            self._keeper,
            self._prompts,
            self._live,
            self._eos_token_ids,
            config.matchers or no_matchers,
            model_config.vocab_size,
        )
        self._grammar_turns = GrammarTurns()
        self._num_preempted = 0

    def create_session(self, owner: str, now: float) -> SessionInfo:
        """A kept, empty session. Raises `CapacityExhausted`."""
        self.expire(now)
        return self._info(self._keeper.open(owner, True, now), now)

    def has_session(self, session: str, owner: str) -> bool:
        """Whether the engine has the session, and it is ``owner``'s."""
        return self._sessions.has(session, owner)

    def session_info(self, session: str, owner: str, now: float) -> SessionInfo:
        """Raises `SessionNotFound`."""
        return self._info(self._sessions.find(session, owner), now)

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
        """A new session that continues from ``value``.

        Raises `CapacityExhausted`, and `InvalidRequest` where it holds tokens that
        the model does not have.
        """
        tokens = [*value.known, *(() if value.constraint is None else value.constraint.tokens)]
        check_tokens(tokens, self._model_config.vocab_size, "session")
        (session,) = self._keeper.fork(Past(value), owner, 1, now)
        return self._info(session, now)

    def rewind(self, session: str, owner: str, past: Past, now: float) -> SessionInfo:
        """Puts the session back to its ``past``, in a new epoch.

        Raises `SessionNotFound`, `InvalidRequest`, and `SessionBusy` while it runs
        a request.
        """
        found = self._sessions.find(session, owner)
        return self._info(self._keeper.rewind(found, past, now), now)

    def expire(self, now: float) -> None:
        """Evicts the idle sessions whose time is over."""
        self._keeper.expire(now)

    def retire(self, max_sessions: int) -> int:
        """Saves and evicts kept sessions, those that run first; returns how many are left.

        The readers of what they run get `Migrated`.
        """
        kept = sorted(
            (s for s in self._sessions if s.keep),
            key=lambda s: self._sessions.request_of(s) is None,
        )
        for session in kept[:max_sessions]:
            self._evict(session, None)
        return max(0, len(kept) - max_sessions)

    def give(self, session: str, owner: str, how: str, now: float) -> SessionInfo | None:
        """Saves and evicts a session: see `server.sessions.ownership.Handover`.

        Where it has a reader and ``how`` is "ask" it stays, and is returned; with "take_over"
        its reader is told so. Raises `SessionNotFound`.
        """
        found = self._sessions.find(session, owner)
        live = self._sessions.request_of(found)
        if live is not None and not live.detached and how == "ask":
            return self._info(found, now)
        self._evict(found, SessionAttached() if how == "take_over" else None)
        return None

    def _evict(self, session: Session, why: RequestError | None) -> None:
        """Saves the session; its reader is redirected, or gets ``why`` it cannot be."""
        if (live := self._sessions.request_of(session)) is not None:
            request_id = live.request.request_id
            if not live.parked:
                self._round.park(live)
            self._round.endings.cancelled.pop(live, None)
            place = (session.epoch, session.seq, session.length)
            event = Failed(request_id, why) if why else Migrated(request_id, session.id, *place)
            self._round.events.append(event)
        self._keeper.evict(session)

    def discard_kept(self, error: RequestError, id: str | None = None) -> None:
        """Forgets kept sessions, as if the process had died: the store has not followed.

        All of them, or the one called ``id``. What the store has of them is what they are.
        Readers see ``error``.
        """
        self._keeper.drop_records(id)
        for session in self._sessions:
            if session.keep and id in (None, session.id):
                if (live := self._sessions.request_of(session)) is not None:
                    self._round.endings.fail(live, error)
                self._sessions.close(session)

    def take_records(self) -> list[Record]:
        """What has happened to kept sessions since the last call, in order."""
        return self._keeper.take_records()

    def insert_prefix(
        self, owner: str, tokens: tuple[int, ...], block: StateBlock, origin: str = ""
    ) -> None:
        """Takes the state after ``tokens`` into the prefix cache; see `keys` for ``origin``."""
        if self._prefixes is not None:
            self._prefixes.insert(owner, tokens, block, origin)

    def take_evicted_prefixes(self) -> list[Evicted]:
        """What the prefix cache has put out since the last call."""
        return [] if self._prefixes is None else self._prefixes.take_evicted()

    def next_expiry(self) -> float | None:
        """When `expire` has something to do, on the clock of ``now``."""
        return self._sessions.next_expiry()

    def _info(self, session: Session, now: float) -> SessionInfo:
        live = self._sessions.request_of(session)
        return info_of(session, live, self._pool.layout.num_bytes, now)
