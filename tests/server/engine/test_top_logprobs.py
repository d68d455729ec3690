"""How probable each generated token was, and what else was probable, in its event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from model.native.runtime import Runtime
from server.engine.engine import Engine
from server.engine.types import Event, TokenEvent
from tests.server.engine.ledger import Ledger
from tests.tiny import drain, finished, request, solo

MakeEngine = Callable[..., Engine]
PROMPT = tuple(range(1, 150))


@pytest.fixture
def runtime(backend: Runtime | None) -> Runtime | None:
    return backend


def tokens(events: list[Event]) -> list[TokenEvent]:
    return [event for event in events if isinstance(event, TokenEvent)]


@pytest.mark.parametrize("num", [0, 1, 5, 20])
def test_each_event_has_as_many_as_were_asked_for(engine: Engine, num: int) -> None:
    found = tokens(solo(engine, request("r", PROMPT, top_logprobs=num, temperature=1.5)))
    assert len(found) == 8
    for event in found:
        assert event.logprob is not None
        assert len(event.top) == num
        assert list(event.top) == sorted(event.top, key=lambda pair: -pair[1])
        assert dict(event.top).get(event.token_id, event.logprob) == event.logprob


def test_most_probable_token_has_its_own_number_to_the_bit(engine: Engine) -> None:
    for event in tokens(solo(engine, request("r", PROMPT, top_logprobs=1, temperature=0.0))):
        assert event.top == ((event.token_id, event.logprob),)


def test_they_are_those_of_the_text_as_a_prompt(engine: Engine) -> None:
    found = tokens(solo(engine, request("r", PROMPT, top_logprobs=3, max_tokens=20, top_k=40)))
    text = (*PROMPT, *(event.token_id for event in found))
    read = replace(request("s", text, generate=False), score=True, num_top=3)
    last = finished(solo(engine, read))
    assert last.logprobs is not None
    assert last.tops is not None
    assert last.logprobs[-20:] == pytest.approx([event.logprob for event in found], abs=1e-4)
    assert [[id for id, _ in top] for top in last.tops[-20:]] == [
        [id for id, _ in event.top] for event in found
    ]


def test_log_has_them(make_engine: MakeEngine) -> None:
    """So that who reads on after a crash gets the very same events."""
    ledger, first, second = Ledger(), make_engine(), make_engine()
    options = {"top_logprobs": 2, "max_tokens": 30}
    whole = tokens(solo(first, request("r", PROMPT, **options)))  # type: ignore[arg-type]
    first.submit(request("r", PROMPT, keep=True, **options), 0.0)  # type: ignore[arg-type]
    seen = [event for _ in range(20) for event in tokens(first.step(0.0))]
    ledger.take(first.take_records())
    (session,) = ledger.entries
    logged = [entry for entry in ledger.entries[session] if isinstance(entry, TokenEvent)]
    assert logged == seen
    second.kept.restore(ledger.past(session), 0.0)
    second.unpark("r")
    assert seen + tokens(drain(second)["r"]) == whole
    drain(first)
