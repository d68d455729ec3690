"""How probable a prompt was that is generated from: one event before its first token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from model.ops.cpu.runtime import Runtime
from server.engine.engine import Engine
from server.engine.types import Event, Request, Scored
from tests.server.engine.ledger import Ledger
from tests.tiny import drain, finished, request, solo, tokens_of

MakeEngine = Callable[..., Engine]
PROMPT = tuple(range(1, 170))


@pytest.fixture
def runtime(backend: Runtime | None) -> Runtime | None:
    return backend


def asked(tokens: tuple[int, ...], session: str | None = None, **options: object) -> Request:
    req = request("r", tokens, session, **options)  # type: ignore[arg-type]
    return replace(req, score=True, num_top=2)


def scored(events: list[Event]) -> Scored:
    (found,) = [event for event in events if isinstance(event, Scored)]
    return found


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("tokens", [(7,), (7, 8), PROMPT])
def test_it_has_a_score_for_every_token_but_the_first(
    engine: Engine, tokens: tuple[int, ...], start: bool
) -> None:
    events = solo(engine, asked(tokens, start=start))
    only_fed = replace(asked(tokens, start=start), sampling=None)
    wanted = finished(solo(engine, only_fed))
    found = scored(events)
    assert wanted.tops is not None
    assert found.token_ids == ((0, *tokens) if start else tokens)
    assert found.logprobs == (None, *(wanted.logprobs or ()))
    assert found.tops == ((), *wanted.tops)
    assert finished(events).logprobs is None


def test_later_prompt_of_a_session_is_scored_whole(engine: Engine) -> None:
    session = engine.create_session("me", 0.0).session
    text = (0, *PROMPT, *tokens_of(solo(engine, request("a", PROMPT, session))), 5, 6, 7)
    found = scored(solo(engine, asked((5, 6, 7), session)))
    whole = scored(solo(engine, asked(text, start=False)))
    assert found.token_ids == (5, 6, 7)
    assert found.logprobs == pytest.approx(whole.logprobs[-3:], abs=1e-4)


def test_cancelled_prompt_has_none(engine: Engine) -> None:
    engine.submit(asked(PROMPT), 0.0)
    engine.step(0.0)
    engine.cancel("r")
    events = drain(engine)["r"]
    assert not any(isinstance(event, Scored) for event in events)
    assert finished(events).logprobs is None


def test_prompt_that_was_being_read_in_a_crash_is_generated_from(
    make_engine: MakeEngine,
) -> None:
    """What had been noted of it is lost; its text is not."""
    ledger, first, second = Ledger(), make_engine(), make_engine()
    first.submit(replace(asked(PROMPT, max_tokens=20), keep=True), 0.0)
    first.step(0.0)
    ledger.take(first.take_records())
    (session,) = ledger.entries
    second.restore(ledger.past(session), 0.0)
    second.unpark("r")
    events = drain(second)["r"]
    assert not any(isinstance(event, Scored) for event in events)
    assert tokens_of(events) == tokens_of(solo(first, request("s", PROMPT, max_tokens=20)))
