"""How probable several continuations of one prompt are, which is fed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from model.ops.cpu.runtime import Runtime
from server.engine.engine import Engine
from server.engine.types import Request, Usage
from tests.tiny import drain, finished, request, solo

MakeEngine = Callable[..., Engine]
PROMPT = tuple(range(1, 150))
ENDS = ((5,), (6, 7), tuple(range(40, 110)))


@pytest.fixture
def runtime(backend: Runtime | None) -> Runtime | None:
    return backend


def compared(prompt: tuple[int, ...] = PROMPT, ends: tuple[tuple[int, ...], ...] = ENDS) -> Request:
    return replace(request("r", prompt, generate=False), continuations=ends, num_top=2)


def in_turn(engine: Engine, prompt: tuple[int, ...], end: tuple[int, ...]) -> object:
    """Of a session that is fed the prompt, and then asked about the continuation."""
    session = engine.create_session("me", 0.0).session
    if prompt:
        solo(engine, request("p", prompt, session, generate=False))
    req = replace(request("e", end, session, generate=False), score=True, num_top=2)
    last = finished(solo(engine, req))
    engine.delete_session(session, "me")
    return last.logprobs, last.tops


@pytest.mark.parametrize("prompt", [(), (7,), (7, 8), PROMPT])
def test_each_has_the_scores_that_it_has_after_its_prompt_alone(
    engine: Engine, prompt: tuple[int, ...]
) -> None:
    engine.submit(compared(prompt), 0.0)
    events = drain(engine)
    assert list(events) == ["r", "r/1", "r/2"]
    for index, found in enumerate(map(finished, events.values())):
        assert (found.logprobs, found.tops) == in_turn(engine, prompt, ENDS[index])
        assert (found.session, found.finish_reason) == (None, None)
        assert found.position == 1 + len(prompt) + len(ENDS[index])
    assert engine.stats().num_sessions == 0


def test_prompt_counts_once(engine: Engine) -> None:
    engine.submit(compared(), 0.0)
    usages = [finished(events).usage for events in drain(engine).values()]
    assert usages == [Usage(150 + 1, 0), Usage(2, 0), Usage(70, 0)]
    assert sum(engine.take_usage().values()) == 149 + 1 + 2 + 70  # the last one is not read


def test_known_beginning_of_the_prompt_is_not_read_again(make_engine: MakeEngine) -> None:
    engine = make_engine(max_prefixes=4)
    found = []
    for _ in range(2):
        engine.submit(compared(), 0.0)
        events = drain(engine)
        found.append([finished(of).logprobs for of in events.values()])
    assert found[0] == found[1]
    assert engine.stats().prefix_hits_total == 1


def test_company_does_not_change_them(engine: Engine) -> None:
    engine.submit(compared(), 0.0)
    alone = [finished(events).logprobs for events in drain(engine).values()]
    for n in range(3):
        engine.submit(request(f"{n}", PROMPT[n:], max_tokens=30), 0.0)
    engine.step(0.0)
    engine.submit(compared(), 0.0)
    events = drain(engine)
    assert [finished(events[name]).logprobs for name in ("r", "r/1", "r/2")] == alone


def test_all_end_where_the_prompt_is_cancelled(engine: Engine) -> None:
    engine.submit(compared(), 0.0)
    engine.step(0.0)
    assert engine.num_running("me") == 3
    engine.cancel("r")
    events = drain(engine)
    for name in ("r", "r/1", "r/2"):
        assert finished(events[name]).finish_reason == "cancelled"
        assert finished(events[name]).logprobs is None
