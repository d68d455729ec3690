"""Sessions go to a store and come back, or are lost when their time is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from model.native.runtime import Runtime
from server.engine.engine import Engine
from server.engine.session import Accepted, Deleted, Opened, Saved
from server.engine.types import Finished, Migrated, TokenEvent
from server.errors import CapacityExhausted, SessionNotFound
from tests.server.engine.ledger import Ledger
from tests.tiny import drain, finished, request, solo, state_of, tokens_of

MakeEngine = Callable[..., Engine]
PROMPT = tuple(range(1, 150))


@pytest.fixture
def runtime(backend: Runtime | None) -> Runtime | None:
    return backend


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def kept(engine: Engine, **options: object) -> str:
    """A session of its own with a text in it."""
    session = engine.kept.create("me", 0.0).session
    solo(engine, request("kept", PROMPT, session, **options))  # type: ignore[arg-type]
    return session


def test_oldest_idle_session_is_evicted_and_restored_with_its_bits(
    make_engine: MakeEngine, ledger: Ledger
) -> None:
    engine = make_engine(max_sessions=2, can_evict=True)
    first, second = kept(engine), kept(engine)
    before = state_of(engine, first)
    third = kept(engine)
    ledger.take(engine.take_records())
    with pytest.raises(SessionNotFound):
        engine.kept.info(first, "me", 0.0)
    last = ledger.entries[first][-1]
    assert isinstance(last, Saved)
    assert last.evicted
    info = engine.kept.restore(ledger.past(first), 5.0)
    assert (info.position, info.seq, info.busy) == (1 + len(PROMPT) + 8, 9, False)
    assert state_of(engine, first) == before
    with pytest.raises(SessionNotFound):  # it made room in its turn
        engine.kept.info(second, "me", 0.0)
    engine.kept.info(third, "me", 0.0)
    assert engine.stats().evicted_sessions_total == 2


@pytest.mark.parametrize("save_interval", [10**6, 40])
def test_restored_session_continues_as_if_never_evicted(
    make_engine: MakeEngine, ledger: Ledger, save_interval: int
) -> None:
    """From the log alone, and from a value and the end of the log."""
    options = {"seed": 4, "max_tokens": 20, "repetition_penalty": 1.2}
    stays, dies = make_engine(), make_engine(save_interval=save_interval)
    mine, theirs = kept(stays, **options), kept(dies, **options)
    ledger.take(dies.take_records())
    heir = make_engine()
    heir.kept.restore(ledger.past(theirs), 0.0)
    wanted = solo(stays, request("r", (), mine, **options))  # type: ignore[arg-type]
    found = solo(heir, request("r", (), theirs, **options))  # type: ignore[arg-type]
    assert tokens_of(found) == tokens_of(wanted)
    assert finished(found).seq == finished(wanted).seq
    assert state_of(heir, theirs) == state_of(stays, mine)


def test_restoring_a_resident_session_changes_nothing(
    make_engine: MakeEngine, ledger: Ledger
) -> None:
    engine = make_engine()
    session = kept(engine)
    ledger.take(engine.take_records())
    past = ledger.past(session)
    solo(engine, request("r", (5, 6), session))
    before = engine.kept.info(session, "me", 0.0)
    assert engine.kept.restore(past, 0.0).position == before.position
    assert engine.kept.info(session, "me", 0.0) == before


def test_request_that_had_not_finished_comes_back_parked(
    make_engine: MakeEngine, ledger: Ledger
) -> None:
    whole = tokens_of(solo(make_engine(), request("r", PROMPT, max_tokens=30, seed=2)))
    first, second = make_engine(), make_engine()
    first.submit(request("r", PROMPT, keep=True, max_tokens=30, seed=2), 0.0)
    seen = tokens_of(event for _ in range(20) for event in first.step(0.0))
    assert 0 < len(seen) < 30
    ledger.take(first.take_records())
    (session,) = ledger.entries
    info = second.kept.restore(ledger.past(session), 0.0)
    assert (info.busy, info.parked, info.seq) == (True, True, len(seen))
    assert not second.has_work()
    second.unpark("r")
    events = drain(second)["r"]
    assert seen + tokens_of(events) == whole
    assert all(isinstance(event, TokenEvent) for event in events[:-1])  # it had started already
    assert finished(events).usage.completion_tokens == 30
    drain(first)


@pytest.mark.parametrize("tokens", [(7,), (7, 8)])
def test_append_that_only_waited_is_done_after_a_restart(
    make_engine: MakeEngine, ledger: Ledger, tokens: tuple[int, ...]
) -> None:
    """Also one of a single token, which leaves nothing for the state to see."""
    first, second = make_engine(), make_engine()
    session = first.kept.create("me", 0.0).session
    first.submit(request("r", tokens, session, generate=False, start=False), 0.0)
    ledger.take(first.take_records())
    second.kept.restore(ledger.past(session), 0.0)
    second.unpark("r")
    last = finished(drain(second)["r"])
    assert (last.finish_reason, last.position) == (None, len(tokens))
    wanted = tokens_of(solo(second, request("w", tokens, start=False)))
    assert tokens_of(solo(second, request("s", (), session))) == wanted


def test_cancel_after_a_restart_keeps_what_was_generated(
    make_engine: MakeEngine, ledger: Ledger
) -> None:
    """Those tokens are still unfed; they are not a prompt that was cut short."""
    first, second = make_engine(), make_engine()
    first.submit(request("r", PROMPT, keep=True, max_tokens=40), 0.0)
    seen = tokens_of(event for _ in range(20) for event in first.step(0.0))
    ledger.take(first.take_records())
    (session,) = ledger.entries
    second.kept.restore(ledger.past(session), 0.0)
    second.cancel("r")
    last = finished(drain(second)["r"])
    assert (last.finish_reason, last.position) == ("cancelled", 1 + len(PROMPT) + len(seen))
    assert last.usage.completion_tokens == len(seen)


def test_idle_session_goes_to_the_store_when_its_time_is_over(
    make_engine: MakeEngine, ledger: Ledger
) -> None:
    engine = make_engine(session_ttl_s=60.0, can_evict=True)
    session = kept(engine)
    assert engine.next_expiry() == 60.0
    engine.expire(60.0)
    stats = engine.stats()
    assert (stats.num_sessions, stats.held_slots, stats.expired_sessions_total) == (0, 0, 1)
    ledger.take(engine.take_records())
    assert engine.kept.restore(ledger.past(session), 61.0).position == 1 + len(PROMPT) + 8
    assert engine.next_expiry() == 121.0


def test_without_a_store_its_end_is_recorded(make_engine: MakeEngine, ledger: Ledger) -> None:
    engine = make_engine(session_ttl_s=60.0)
    session = kept(engine)
    engine.expire(60.0)
    records = engine.take_records()
    assert records[-1] == (session, Deleted())
    ledger.take(records)
    assert not ledger.entries


def test_full_engine_without_a_store_refuses(make_engine: MakeEngine) -> None:
    engine = make_engine(max_sessions=2)
    for _ in range(2):
        kept(engine)
    with pytest.raises(CapacityExhausted):
        engine.kept.create("me", 0.0)


def test_without_a_store_unattended_sessions_are_evicted_first(make_engine: MakeEngine) -> None:
    engine = make_engine(max_sessions=3)
    promised = kept(engine)
    for name in "ab":
        solo(engine, replace(request(name, keep=True), unattended=True))
    first, second = (session.id for session in engine._sessions if session.id != promised)
    engine.take_records()
    engine.kept.create("me", 0.0)
    assert engine.take_records()[0] == (first, Deleted())
    solo(engine, request("c", session=second))  # it is somebody's own from now on
    with pytest.raises(CapacityExhausted):
        engine.kept.create("me", 0.0)


def test_only_idle_sessions_are_evicted(make_engine: MakeEngine) -> None:
    engine = make_engine(max_sessions=2, can_evict=True)
    for name in "ab":
        engine.submit(request(name, keep=True), 0.0)
    with pytest.raises(CapacityExhausted):
        engine.kept.create("me", 0.0)
    drain(engine)
    engine.kept.create("me", 0.0)


def test_records_tell_what_happened_in_order(make_engine: MakeEngine) -> None:
    engine = make_engine()
    session = engine.kept.create("me", 0.0).session
    solo(engine, request("r", (1, 2, 3), session, max_tokens=2))
    solo(engine, request("s", (4,), session, generate=False))
    solo(engine, request("not kept"))
    engine.kept.delete(session, "me")
    records = engine.take_records()
    assert {id for id, _ in records} == {session}
    kinds = [Opened, Accepted, TokenEvent, TokenEvent, Finished, Accepted, Finished, Deleted]
    assert [type(entry) for _, entry in records] == kinds
    accepted = records[1][1]
    assert isinstance(accepted, Accepted)
    assert accepted.tokens == (0, 1, 2, 3)  # with the start token
    assert engine.take_records() == []


def test_session_is_saved_after_so_many_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine(save_interval=30)
    session = engine.kept.create("me", 0.0).session
    solo(engine, request("r", range(1, 5), session, max_tokens=70))
    saved = [entry.value for _, entry in engine.take_records() if isinstance(entry, Saved)]
    assert [value.position for value in saved] == [30, 60]
    assert [value.progress is not None for value in saved] == [True, True]
    assert [value.state is not None for value in saved] == [True, True]


def test_retired_sessions_are_saved_and_their_readers_notified(
    make_engine: MakeEngine, ledger: Ledger
) -> None:
    engine, heir = make_engine(can_evict=True), make_engine()
    idle = kept(engine)
    engine.submit(request("lost", max_tokens=5), 0.0)
    engine.submit(request("r", PROMPT, keep=True, max_tokens=40), 0.0)
    seen = tokens_of(e for _ in range(20) for e in engine.step(0.0) if e.request_id == "r")
    assert engine.kept.retire(1) == 1  # those that run go first
    assert engine.kept.retire(1) == 0
    events = drain(engine)
    ledger.take(engine.take_records())
    (migrated,) = events["r"]
    assert isinstance(migrated, Migrated)
    assert (migrated.seq, migrated.position) == (len(seen), 1 + len(PROMPT) + len(seen))
    assert {idle, migrated.session} == ledger.entries.keys()
    assert heir.kept.restore(ledger.past(migrated.session), 0.0).parked
    heir.unpark("r")
    heir.step(0.0)
    heir.cancel("r")
    drain(heir)


def test_retiring_forgets_a_cancel_that_waits(make_engine: MakeEngine) -> None:
    engine = make_engine(can_evict=True)
    engine.submit(request(keep=True), 0.0)
    engine.cancel("r")
    engine.kept.retire(1)
    assert [type(event) for event in engine.step(0.0)] == [Migrated]
    assert not engine.has_work()


def test_cancelled_request_that_is_parked_can_not_leave_before_it_ends(
    make_engine: MakeEngine,
) -> None:
    """Its session has been idle for longest, and there is no other to make room."""
    engine = make_engine(max_sessions=1, can_evict=True, max_detached_tokens=1)
    engine.submit(request(keep=True, max_tokens=100), 0.0)
    engine.detach("r")
    drain(engine)
    assert engine.stats().num_parked == 1
    engine.cancel("r")
    with pytest.raises(CapacityExhausted):
        engine.kept.create("me", 0.0)
    engine.expire(1e9)
    assert finished(drain(engine)["r"]).finish_reason == "cancelled"
    engine.kept.create("me", 0.0)
