"""A session is cut back to what it was; what came after it is gone."""

from __future__ import annotations

import pytest

from model.ops.cpu.runtime import Runtime
from server.engine.engine import Engine
from server.engine.value import Past
from server.errors import InvalidRequest, SessionBusy
from tests.server.engine.ledger import Ledger
from tests.tiny import drain, finished, request, solo, started, state_of, tokens_of

PROMPT = tuple(range(1, 150))


@pytest.fixture
def runtime(backend: Runtime | None) -> Runtime | None:
    return backend


@pytest.fixture
def session(engine: Engine) -> str:
    """149 tokens and a start token read, 20 generated."""
    name = engine.create_session("me", 0.0).session
    solo(engine, request("r", PROMPT, name, max_tokens=20, seed=3))
    return name


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def rewind(engine: Engine, ledger: Ledger, session: str, at: int) -> None:
    ledger.take(engine.take_records())
    engine.rewind(session, "me", ledger.past(session, at), 0.0)
    ledger.take(engine.take_records())


def test_rewound_session_generates_the_same_again(
    engine: Engine, ledger: Ledger, session: str
) -> None:
    before = state_of(engine, session)
    wanted = tokens_of(solo(engine, request("w", PROMPT, max_tokens=20, seed=3)))
    rewind(engine, ledger, session, 157)
    again = solo(engine, request("r", (), session, max_tokens=13, seed=3))
    assert tokens_of(again) == wanted[7:]
    assert state_of(engine, session) == before


@pytest.mark.parametrize("at", [0, 1, 63, 64, 65, 128, 149])
def test_session_rewound_into_its_prompt_equals_a_fresh_one_with_that_text(
    engine: Engine, ledger: Ledger, session: str, at: int
) -> None:
    rewind(engine, ledger, session, at)
    fresh = engine.create_session("me", 0.0).session
    if at:
        text = (0, *PROMPT)[:at]
        solo(engine, request("a", text, fresh, generate=False, start=False))
    ends = [solo(engine, request("r", range(40, 120), name)) for name in (fresh, session)]
    assert tokens_of(ends[0]) == tokens_of(ends[1])
    assert state_of(engine, fresh) == state_of(engine, session)


def test_epoch_is_new_and_events_count_on(engine: Engine, ledger: Ledger, session: str) -> None:
    rewind(engine, ledger, session, 100)
    info = engine.session_info(session, "me", 0.0)
    assert (info.epoch, info.seq, info.position) == (1, 21, 100)
    events = solo(engine, request("r", (5,), session, max_tokens=3))
    assert (started(events).epoch, started(events).position) == (1, 100)
    assert finished(events).seq == 21 + 4
    rewind(engine, ledger, session, 50)
    rewind(engine, ledger, session, 20)
    assert engine.session_info(session, "me", 0.0).epoch == 3


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
    (info,) = engine.fork(session, "me", 1, 0.0)
    tokens = tokens_of(solo(engine, request("f", (), info.session)))
    return tokens, state_of(engine, info.session)


def test_session_that_runs_can_not_be_rewound(engine: Engine, ledger: Ledger, session: str) -> None:
    ledger.take(engine.take_records())
    engine.submit(request("r", (1, 2), session), 0.0)
    with pytest.raises(SessionBusy):
        engine.rewind(session, "me", ledger.past(session, 10), 0.0)
    assert finished(drain(engine)["r"]).position == 170 + 2 + 8


def test_length_beyond_the_text_is_refused_and_changes_nothing(
    engine: Engine, ledger: Ledger, session: str
) -> None:
    ledger.take(engine.take_records())
    past = ledger.past(session)
    before = engine.session_info(session, "me", 0.0)
    with pytest.raises(InvalidRequest) as caught:
        engine.rewind(session, "me", Past(past.value, past.entries, 171), 0.0)
    assert caught.value.param == "at"
    assert engine.session_info(session, "me", 0.0) == before
    assert engine.take_records() == []
