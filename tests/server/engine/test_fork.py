"""Copies of a session, as it is or as it was; and sessions that are cut back to what they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from model.native.runtime import Runtime
from server.engine import kept
from server.engine.engine import Engine
from server.engine.session import Opened, Past, Saved
from server.errors import CapacityExhausted, InvalidRequest, SessionBusy, SessionNotFound
from tests.server.engine.ledger import Ledger
from tests.tiny import drain, finished, request, solo, started, state_of, tokens_of

MakeEngine = Callable[..., Engine]
PROMPT = tuple(range(1, 150))


@pytest.fixture
def runtime(backend: Runtime | None) -> Runtime | None:
    return backend


@pytest.fixture
def session(engine: Engine) -> str:
    """149 tokens and a start token read, 20 generated."""
    name = engine.kept.create("me", 0.0).session
    solo(engine, request("r", PROMPT, name, max_tokens=20, seed=3))
    return name


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def fork(engine: Engine, session: str, num: int = 1) -> list[str]:
    return [info.session for info in engine.kept.fork(session, "me", num, 0.0)]


def rewind(engine: Engine, ledger: Ledger, session: str, at: int) -> None:
    ledger.take(engine.take_records())
    engine.kept.rewind(session, "me", ledger.past(session, at), 0.0)
    ledger.take(engine.take_records())


def test_forks_continue_like_the_session_and_independently(engine: Engine, session: str) -> None:
    copies = fork(engine, session, 3)
    for name, copy in zip("abc", copies, strict=True):
        engine.submit(request(name, (), copy, max_tokens=20, seed=4), 0.0)
    events = drain(engine)
    engine.submit(request("d", (), session, max_tokens=20, seed=5), 0.0)
    other = drain(engine)["d"]
    assert len({tuple(tokens_of(events[name])) for name in "abc"}) == 1
    assert len({state_of(engine, copy) for copy in copies}) == 1
    assert tokens_of(other) != tokens_of(events["a"])
    again = solo(engine, request("e", (), fork(engine, copies[0])[0], max_tokens=20, seed=5))
    assert finished(again).position == 150 + 20 + 20 + 20


def test_forks_of_one_place_are_of_one_stored_state(
    engine: Engine, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session itself is saved there, so that its file outlives a fork that is deleted."""
    monkeypatch.setattr(kept, "SAVED_FORK_BYTES", 0)
    engine.take_records()
    (first,) = fork(engine, session)
    (_, opened), (name, saved) = engine.take_records()
    assert isinstance(opened, Opened)
    assert isinstance(saved, Saved)
    assert name == session
    assert saved.value.state is not None
    assert saved.value.state is opened.value.state
    saved.value.state.file = "file"  # as a store does
    engine.kept.delete(first, "me")
    engine.take_records()
    fork(engine, session)
    ((_, again),) = engine.take_records()
    assert isinstance(again, Opened)
    assert again.value.state is not None
    assert again.value.state.file == "file"
    solo(engine, request("more", (), session, max_tokens=2))
    engine.take_records()
    assert fork(engine, session)
    _, later = engine.take_records()[0]
    assert isinstance(later, Opened)
    assert later.value.state is not None
    assert later.value.state.file is None


def test_many_forks_share_one_state_and_hold_no_slot(make_engine: MakeEngine) -> None:
    engine = make_engine(max_sessions=2, max_asleep=101)
    session = finished(solo(engine, request(keep=True))).session
    assert session is not None
    copies = [engine._sessions.find(name, "me") for name in fork(engine, session, 100)]
    assert len({id(copy.state) for copy in copies}) == 1
    assert copies[0].state is not None
    assert engine.stats().held_slots == 1


def test_fork_of_a_session_that_runs_does_not_disturb_it(engine: Engine) -> None:
    """Between two chunks of its prompt, and between two tokens."""
    wanted = tokens_of(solo(engine, request("w", PROMPT, seed=1, max_tokens=30)))
    engine.submit(request("r", PROMPT, keep=True, seed=1, max_tokens=30), 0.0)
    (session,) = (entry.value.id for _, entry in engine.take_records() if isinstance(entry, Opened))
    seen, copies = [], []
    while engine.has_work():
        seen += engine.step(0.0)
        copies.append((len(tokens_of(seen)), *fork(engine, session)))
    assert tokens_of(seen) == wanted
    for num_seen, copy in copies[:: len(copies) // 5]:
        assert engine.kept.info(copy, "me", 0.0).position == 150 + num_seen
        if num_seen < 30:
            rest = solo(engine, request("f", (), copy, seed=1, max_tokens=30 - num_seen))
            assert tokens_of(rest) == wanted[num_seen:]


def test_adopted_value_is_a_session_of_its_new_owner(engine: Engine, session: str) -> None:
    value = engine.kept.value(session, "me")
    info = engine.kept.adopt(value, "you", 0.0)
    assert (info.position, info.seq, info.epoch) == (170, 0, 0)
    with pytest.raises(SessionNotFound):
        engine.kept.info(info.session, "me", 0.0)
    mine = solo(engine, request("a", (), session))
    theirs = solo(engine, request("b", (), info.session, owner="you"))
    assert tokens_of(mine) == tokens_of(theirs)


def test_forks_that_do_not_all_fit_are_none(make_engine: MakeEngine) -> None:
    engine = make_engine(max_sessions=3)
    session = finished(solo(engine, request(keep=True))).session
    assert session is not None
    with pytest.raises(CapacityExhausted):
        fork(engine, session, 3)
    assert engine.stats().num_sessions == 1
    ledger = Ledger()
    ledger.take(engine.take_records())
    assert ledger.entries.keys() == {session}
    assert len(fork(engine, session, 2)) == 2


@pytest.mark.parametrize("num_generated", [0, 7])
def test_session_of_the_past_continues_from_there(
    engine: Engine, ledger: Ledger, session: str, num_generated: int
) -> None:
    before = state_of(engine, session)
    wanted = tokens_of(solo(engine, request("w", PROMPT, max_tokens=20, seed=3)))
    ledger.take(engine.take_records())
    past = ledger.past(session, 150 + num_generated)
    (copy,) = engine.kept.fork(session, "me", 1, 0.0, past)
    assert (copy.position, copy.seq) == (150 + num_generated, 0)
    rewind(engine, ledger, session, 150 + num_generated)
    for name in (copy.session, session):
        rest = solo(engine, request("r", (), name, max_tokens=20 - num_generated, seed=3))
        assert tokens_of(rest) == wanted[num_generated:]
        assert state_of(engine, name) == before


@pytest.mark.parametrize("at", [0, 1, 63, 64, 65, 128, 149])
def test_session_of_a_part_of_its_prompt_equals_a_fresh_one_with_that_text(
    engine: Engine, ledger: Ledger, session: str, at: int
) -> None:
    ledger.take(engine.take_records())
    (copy,) = engine.kept.fork(session, "me", 1, 0.0, ledger.past(session, at))
    rewind(engine, ledger, session, at)
    fresh = engine.kept.create("me", 0.0).session
    if at:
        text = (0, *PROMPT)[:at]
        solo(engine, request("a", text, fresh, generate=False, start=False))
    names = (fresh, session, copy.session)
    ends = [tokens_of(solo(engine, request("r", range(40, 120), name))) for name in names]
    assert ends[0] == ends[1] == ends[2]
    assert len({state_of(engine, name) for name in names}) == 1


def test_epoch_is_new_and_seq_continues(engine: Engine, ledger: Ledger, session: str) -> None:
    rewind(engine, ledger, session, 100)
    info = engine.kept.info(session, "me", 0.0)
    assert (info.epoch, info.seq, info.position) == (1, 21, 100)
    events = solo(engine, request("r", (5,), session, max_tokens=3))
    assert (started(events).epoch, started(events).position) == (1, 100)
    assert finished(events).seq == 21 + 4
    rewind(engine, ledger, session, 50)
    rewind(engine, ledger, session, 20)
    assert engine.kept.info(session, "me", 0.0).epoch == 3


def test_past_of_a_rewound_session_is_that_of_its_new_text(
    engine: Engine, ledger: Ledger, session: str
) -> None:
    rewind(engine, ledger, session, 100)
    solo(engine, request("r", range(200, 270), session, max_tokens=5, seed=8))
    copy = state_after_generating(engine, session)
    rewind(engine, ledger, session, 172)
    rewind(engine, ledger, session, 170)
    solo(engine, request("r", (), session, max_tokens=5, seed=8))
    assert state_after_generating(engine, session) == copy


def state_after_generating(engine: Engine, session: str) -> tuple[list[int], bytes]:
    (info,) = engine.kept.fork(session, "me", 1, 0.0)
    tokens = tokens_of(solo(engine, request("f", (), info.session)))
    return tokens, state_of(engine, info.session)


def test_session_that_runs_can_not_be_rewound(engine: Engine, ledger: Ledger, session: str) -> None:
    ledger.take(engine.take_records())
    engine.submit(request("r", (1, 2), session), 0.0)
    with pytest.raises(SessionBusy):
        engine.kept.rewind(session, "me", ledger.past(session, 10), 0.0)
    assert finished(drain(engine)["r"]).position == 170 + 2 + 8


def test_length_beyond_the_text_is_refused_and_changes_nothing(
    engine: Engine, ledger: Ledger, session: str
) -> None:
    ledger.take(engine.take_records())
    past = ledger.past(session)
    before = engine.kept.info(session, "me", 0.0)
    with pytest.raises(InvalidRequest) as caught:
        engine.kept.rewind(session, "me", Past(past.value, past.entries, 171), 0.0)
    assert caught.value.param == "at"
    assert engine.kept.info(session, "me", 0.0) == before
    assert engine.take_records() == []
