"""Requests are parked while they have no reader, and get another one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from server.engine.engine import Engine
from server.engine.types import Failed, Started, TokenEvent
from server.errors import InvalidRequest, SessionAttached
from tests.fakes import FakeRuntime
from tests.tiny import drain, finished, request, solo, tiny_tokenizer, tokens_of

MakeEngine = Callable[..., Engine]


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime(tiny_tokenizer().vocab_size)


@pytest.fixture
def whole(engine: Engine) -> list[int]:
    """What 60 tokens are, without interruption."""
    return tokens_of(solo(engine, request("whole", max_tokens=60)))


def run(engine: Engine, num_steps: int) -> list[int]:
    return tokens_of(event for _ in range(num_steps) for event in engine.step(0.0))


def begun(engine: Engine, session: str | None = None) -> list[int]:
    """The first ten tokens of the request ``r`` on a session that is kept."""
    engine.submit(request("r", session=session, keep=True, max_tokens=60), 0.0)
    return run(engine, 10)


def test_parked_request_is_idle_until_unparked(engine: Engine, whole: list[int]) -> None:
    seen = begun(engine)
    engine.park("r")
    assert not engine.has_work()
    assert (engine.stats().num_parked, engine.stats().num_running) == (1, 0)
    assert run(engine, 5) == []
    engine.unpark("r")
    assert seen + tokens_of(drain(engine)["r"]) == whole


def test_parking_and_unparking_twice_or_too_late_does_nothing(
    engine: Engine, whole: list[int]
) -> None:
    seen = begun(engine)
    for _ in range(2):
        engine.park("r")
    for _ in range(2):
        engine.unpark("r")
    assert seen + tokens_of(drain(engine)["r"]) == whole
    for verb in (engine.park, engine.unpark, engine.detach, engine.cancel):
        verb("r")
    assert not engine.has_work()


@pytest.mark.parametrize("when", ["waiting", "parked"])
def test_cancel_reaches_a_request_wherever_it_is(make_engine: MakeEngine, when: str) -> None:
    engine = make_engine(max_running=1)
    engine.submit(request("first", max_tokens=5), 0.0)
    engine.submit(request("r", keep=True), 0.0)
    if when == "parked":
        engine.park("r")
    engine.cancel("r")
    last = finished(drain(engine)["r"])
    assert (last.finish_reason, last.position) == ("cancelled", 0)


def test_unread_request_parks_after_the_detached_limit(
    make_engine: MakeEngine, whole: list[int]
) -> None:
    engine = make_engine(max_detached_tokens=15)
    seen = begun(engine)
    engine.detach("r")
    seen += tokens_of(drain(engine)["r"])
    assert len(seen) == 25
    (session,) = engine._sessions
    info = engine.kept.info(session.id, "me", 0.0)
    assert (info.busy, info.parked) == (True, True)
    engine.attach(session.id, "me", "r2", take_over=False)
    engine.unpark("r2")
    assert seen + tokens_of(drain(engine)["r2"]) == whole


def test_parked_and_unread_is_idle_and_expires(make_engine: MakeEngine) -> None:
    engine = make_engine(max_detached_tokens=5, session_ttl_s=60.0)
    begun(engine)
    engine.detach("r")
    drain(engine, now=10.0)
    assert engine.next_expiry() == 70.0
    engine.expire(70.0)
    assert engine.stats().num_sessions == 0
    assert not engine.has_work()


def test_parked_by_its_reader_does_not_expire(make_engine: MakeEngine) -> None:
    engine = make_engine(session_ttl_s=60.0)
    begun(engine)
    engine.park("r")
    assert engine.next_expiry() is None
    engine.expire(1e9)
    engine.unpark("r")
    assert finished(drain(engine)["r"]).finish_reason == "length"


def test_detached_request_of_a_session_that_is_not_kept_ends(engine: Engine) -> None:
    engine.submit(request(max_tokens=60), 0.0)
    run(engine, 5)
    engine.detach("r")
    assert finished(drain(engine)["r"]).finish_reason == "cancelled"


def test_detaching_wakes_what_its_reader_had_parked(make_engine: MakeEngine) -> None:
    engine = make_engine(max_detached_tokens=15)
    begun(engine)
    engine.park("r")
    engine.detach("r")
    assert len(tokens_of(drain(engine)["r"])) == 15
    engine.expire(1e9)


def test_second_reader_is_refused_unless_it_takes_over(engine: Engine, whole: list[int]) -> None:
    session = engine.kept.create("me", 0.0).session
    seen = begun(engine, session)
    with pytest.raises(SessionAttached):
        engine.attach(session, "me", "r2", take_over=False)
    seen += run(engine, 1)
    info = engine.attach(session, "me", "r2", take_over=True)
    assert (info.busy, info.parked, info.seq) == (True, True, len(seen))
    (failed,) = engine.step(0.0)
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.error.code) == ("r", "session_attached")
    engine.unpark("r2")
    events = drain(engine)
    assert events.keys() == {"r2"}
    assert all(isinstance(event, TokenEvent) for event in events["r2"][:-1])
    assert seen + tokens_of(events["r2"]) == whole


def test_reader_of_an_idle_session_finds_its_place(engine: Engine) -> None:
    session = engine.kept.create("me", 0.0).session
    last = finished(solo(engine, request("r", session=session)))
    info = engine.attach(session, "me", "r2", take_over=False)
    assert (info.busy, info.position, info.seq) == (False, last.position, last.seq)
    assert not engine.has_work()


def test_reader_cannot_use_the_id_of_a_live_request(engine: Engine) -> None:
    session = engine.kept.create("me", 0.0).session
    begun(engine, session)
    engine.submit(request("other"), 0.0)
    with pytest.raises(InvalidRequest):
        engine.attach(session, "me", "other", take_over=True)
    assert finished(drain(engine)["r"]).finish_reason == "length"


def test_cancel_holds_for_a_request_that_gets_another_reader(engine: Engine) -> None:
    """Both names are cancelled before the next step; it ends once."""
    session = engine.kept.create("me", 0.0).session
    begun(engine, session)
    engine.cancel("r")
    engine.attach(session, "me", "r2", take_over=True)
    engine.cancel("r2")
    events = drain(engine)
    assert [type(event) for event in events["r"]] == [Failed]
    assert finished(events["r2"]).finish_reason == "cancelled"


def test_restored_request_can_continue_without_a_reader(make_engine: MakeEngine) -> None:
    engine = make_engine(max_detached_tokens=15)
    session = engine.kept.create("me", 0.0).session
    begun(engine, session)
    engine.detach("r")
    drain(engine)
    engine.continue_unattended(session, "me")
    assert len(tokens_of(drain(engine)["r"])) == 15
    engine.expire(1e9)


def test_request_parked_before_its_start_sends_started_once_unparked(engine: Engine) -> None:
    engine.submit(request("r", keep=True, max_tokens=3), 0.0)
    engine.park("r")
    assert engine.step(0.0) == []
    engine.unpark("r")
    assert isinstance(drain(engine)["r"][0], Started)
