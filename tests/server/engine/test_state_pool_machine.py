"""Random comings and goings of sessions: each has its own state, in a slot or out of it.

The machine feeds tokens to states as `FakeRunner` does, so that a state says whose
it is and what it has seen. Free slots are full of junk.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model.state import StateLayout
from server.engine.detokenizer import Detokenizer
from server.engine.live import Live
from server.engine.session import Session
from server.engine.sessions import SessionTable
from server.engine.state_pool import StatePool
from server.engine.types import Request
from server.engine.value import SessionValue, StateBlock
from server.errors import SessionBusy, SessionNotFound
from tests.fakes import STATE_BYTES, state_after
from tests.tiny import tiny_tokenizer

SLOTS, ASLEEP, TTL_S = 3, 3, 10.0
TOKENS = st.lists(st.integers(0, 255), min_size=1, max_size=4)


@dataclass
class Known:
    """What the machine knows of a session: the tokens that its state has seen, and who owns it."""

    owner: str
    keep: bool
    seen: list[int] = field(default_factory=list)
    runs: bool = False


@dataclass(frozen=True)
class Taken:
    """A state that somebody keeps, as it was when it was taken."""

    value: SessionValue
    seen: tuple[int, ...]


class PoolMachine(RuleBasedStateMachine):
    """What an engine does to its pool and its table, beside what it may expect."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = StatePool(StateLayout((), 0, STATE_BYTES), SLOTS)
        self.pool.blocks[:] = 255
        self.table = SessionTable(self.pool, ASLEEP, TTL_S)
        self.ids, self.now = itertools.count(1), 0.0
        self.known: dict[str, Known] = {}
        self.quiet: list[str] = []  # in the order in which they went idle
        self.released: list[str] = []  # in the order in which they may lose their slots
        self.taken: list[Taken] = []

    # Coming

    @initialize(num=st.integers(SLOTS, SLOTS + ASLEEP))
    def fill(self, num: int) -> None:
        """All slots are held, by sessions that run or may lose them."""
        for token in range(num):
            self.open(True, "ann")
            self.run(*self.one(self.quiet[-1]), [token])
            if token % 2:
                self.end_one(*self.one(f"s{token + 1}"))

    @rule(keep=st.booleans(), owner=st.sampled_from(["ann", "bob"]))
    def open(self, keep: bool, owner: str) -> None:
        self.add(SessionValue(f"s{next(self.ids)}", owner), keep, ())

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        taken = data.draw(st.sampled_from(self.taken))
        self.add(replace(taken.value, id=f"s{next(self.ids)}"), True, taken.seen)

    def add(self, value: SessionValue, keep: bool, seen: tuple[int, ...]) -> None:
        assert self.table.has_room == (len(self.known) < SLOTS + ASLEEP)
        if not self.table.has_room:
            return
        session = Session.of(value, Detokenizer(tiny_tokenizer()), self.tick())
        session.keep = keep
        self.table.add(session)
        self.known[session.id] = Known(session.owner, keep, list(seen))
        if keep:
            self.quiet.append(session.id)

    # Running

    @precondition(lambda self: self.known)
    @rule(data=st.data(), tokens=TOKENS)
    def begin(self, data: st.DataObject, tokens: list[int]) -> None:
        self.run(*self.any(data), tokens)

    def run(self, session: Session, known: Known, tokens: list[int]) -> None:
        live = Live(Request("r", known.owner, (1,), None, session.id), session, 0, True)
        if known.runs:
            with pytest.raises(SessionBusy):
                self.table.begin(session, live)
            return
        self.table.begin(session, live)
        known.runs = True
        self.quiet = [id for id in self.quiet if id != session.id]
        self.step(session, tokens)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), tokens=TOKENS)
    def go_on(self, data: st.DataObject, tokens: list[int]) -> None:
        session, _ = self.any(data, self.running())
        self.step(session, tokens)

    def step(self, session: Session, tokens: list[int]) -> None:
        """Feeds a session that runs, if it gets a slot: a slot may be taken from another one."""
        has_slot, is_full = session.slot is not None, not self.pool._free
        loser = self.table.find(*self.name(self.released[0])) if self.released else None
        is_awake = has_slot or not is_full or loser is not None
        assert self.table.wake(session) == is_awake
        if not has_slot and is_full and loser is not None:
            assert loser.slot is None
            self.released.remove(loser.id)
        self.released = [id for id in self.released if id != session.id]
        if is_awake:
            self.advance(session, self.known[session.id], tokens)
            block = self.pool.block(session.slot or 0)
            block[:] = list(state_after(tokens, block.tobytes()))

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), owner=st.sampled_from(["ann", "bob"]))
    def begin_with_a_known_prefix(self, data: st.DataObject, owner: str) -> None:
        """Whose first tokens somebody has fed before gets that state."""
        taken = data.draw(st.sampled_from(self.taken))
        assert taken.value.state is not None
        if not self.pool._free or not self.table.has_room:
            return
        self.open(True, owner)
        session, known = self.one(self.quiet[-1])
        assert self.table.wake(session)
        self.advance(session, known, list(taken.seen))
        self.table.put(session, taken.value.state)
        self.table.release(session)
        self.may_lose_its_slot(session)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        session, _ = self.any(data, self.running())
        self.table.release(session)
        self.may_lose_its_slot(session)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.end_one(*self.any(data, self.running()))

    def end_one(self, session: Session, known: Known) -> None:
        self.table.end(session, self.tick())
        known.runs = False
        if known.keep:
            self.quiet.append(session.id)
            self.may_lose_its_slot(session)
        else:
            self.gone(session)

    # Keeping and going

    @precondition(lambda self: any(known.seen for known in self.known.values()))
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        session, known = self.any(data, [id for id, known in self.known.items() if known.seen])
        state = self.table.state_of(session)
        assert (state is session.state) == (session.slot is None)
        self.taken.append(Taken(replace(session.value(state), progress=None), tuple(known.seen)))

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session, _ = self.any(data, self.idle())
        self.table.close(session)
        self.gone(session)

    @rule(seconds=st.sampled_from([0.0, TTL_S / 4, TTL_S / 2]))
    def evict(self, seconds: float) -> None:
        self.now += seconds
        while (due := self.table.next_expiry()) is not None and due <= self.now:
            session = self.table.oldest_quiet()
            assert session is not None
            assert session.id == self.quiet[0]
            self.table.close(session)
            self.gone(session)
        assert bool(self.quiet) == (due is not None)

    # What always holds

    @invariant()
    def slots_have_one_owner_each(self) -> None:
        assert len(self.pool._free) + self.pool.num_held == self.pool.num_slots == SLOTS
        slots = sorted(session.slot for session in self.table if session.slot is not None)
        assert len(set(slots)) == len(slots) == self.pool.num_held
        assert set(slots) <= set(range(SLOTS))

    @invariant()
    def every_session_has_its_own_state(self) -> None:
        assert {session.id for session in self.table} == self.known.keys()
        for session in self.table:
            seen = self.known[session.id].seen
            state = self.table.state_of(session)
            assert (None if state is None else state.data.tobytes()) == marked(seen), session
            assert session.slot is None or session.state is None
            if session.slot is not None:
                assert self.pool.block(session.slot).tobytes() == state_after(seen)

    @invariant()
    def sleeping_states_never_change(self) -> None:
        for taken in self.taken:
            assert taken.value.state is not None
            assert not taken.value.state.data.flags.writeable
            assert taken.value.state.data.tobytes() == marked(taken.seen)
        asleep = [session.state for session in self.table if session.state is not None]
        assert self.table.num_asleep == len(asleep)
        assert all(not state.data.flags.writeable for state in asleep)

    @invariant()
    def only_the_owner_finds_a_session(self) -> None:
        for id, known in self.known.items():
            assert self.table.find(id, known.owner).id == id
            with pytest.raises(SessionNotFound):
                self.table.find(id, "ann" if known.owner == "bob" else "bob")

    def teardown(self) -> None:
        """With the last session goes the last slot."""
        for session in self.table:
            self.table.drop_request(session)
            self.table.close(session)
        assert (len(self.pool._free), self.pool.num_held, len(self.table)) == (SLOTS, 0, 0)

    # Inside

    def tick(self) -> float:
        self.now += 0.01
        return self.now

    def any(self, data: st.DataObject, ids: list[str] | None = None) -> tuple[Session, Known]:
        return self.one(data.draw(st.sampled_from(sorted(self.known if ids is None else ids))))

    def one(self, id: str) -> tuple[Session, Known]:
        return self.table.find(*self.name(id)), self.known[id]

    def name(self, id: str) -> tuple[str, str]:
        return id, self.known[id].owner

    def running(self) -> list[str]:
        return [id for id, known in self.known.items() if known.runs]

    def idle(self) -> list[str]:
        return [id for id, known in self.known.items() if not known.runs]

    def may_lose_its_slot(self, session: Session) -> None:
        if session.slot is not None and session.id not in self.released:
            self.released.append(session.id)

    def advance(self, session: Session, known: Known, tokens: list[int]) -> None:
        for token in tokens:
            session.hold(token)
        session.advance(session.next(len(tokens)))
        known.seen += tokens

    def gone(self, session: Session) -> None:
        assert session.slot is None
        del self.known[session.id]
        self.quiet = [id for id in self.quiet if id != session.id]
        self.released = [id for id in self.released if id != session.id]


def marked(seen: list[int] | tuple[int, ...]) -> bytes | None:
    """The state that has seen these tokens; None where it is the empty one."""
    return state_after(seen) if seen else None


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
test_sessions_never_share_a_slot_or_a_state = PoolMachine.TestCase


def test_copies_share_the_state_that_they_sleep_with() -> None:
    pool = StatePool(StateLayout((), 0, STATE_BYTES), SLOTS)
    table = SessionTable(pool, ASLEEP, TTL_S)
    state = StateBlock(pool.block(0).copy())
    value = SessionValue("s1", "ann", position=3, state=state)
    copies = [Session.of(replace(value, id=id), Detokenizer(tiny_tokenizer()), 0.0) for id in "abc"]
    for copy in copies:
        table.add(copy)
    assert all(table.state_of(copy) is state for copy in copies)
    assert table.wake(copies[0])
    pool.block(copies[0].slot or 0)[:] = 7
    assert table.state_of(copies[1]) is state
    assert not state.data.any()
