"""Several continuations of one prompt, which is fed once: drawn, or given and scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from model.native.runtime import Runtime
from server.engine.engine import Engine
from server.engine.types import Request, Usage
from tests.fakes import FakeRuntime
from tests.tiny import (
    drain,
    finished,
    request,
    solo,
    started,
    text_of,
    tiny_engine,
    tiny_tokenizer,
    tokens_of,
)

MakeEngine = Callable[..., Engine]
PROMPT = tuple(range(1, 150))
ENDS = ((5,), (6, 7), tuple(range(40, 110)))


@pytest.fixture
def runtime(backend: Runtime | None) -> Runtime | None:
    return backend


def choices(num: int, tokens: tuple[int, ...] = PROMPT, **sampling: object) -> Request:
    return replace(request("r", tokens, **sampling), num_choices=num)


@pytest.mark.parametrize("tokens", [(7,), (7, 8), PROMPT])
def test_each_choice_is_what_its_seed_alone_would_give(
    engine: Engine, tokens: tuple[int, ...]
) -> None:
    engine.submit(choices(4, tokens, seed=10, max_tokens=20, repetition_penalty=1.2), 0.0)
    events = drain(engine)
    assert list(events) == ["r", "r/1", "r/2", "r/3"]
    for index, found in enumerate(events.values()):
        options = {"seed": 10 + index, "max_tokens": 20, "repetition_penalty": 1.2}
        alone = solo(engine, request("alone", tokens, **options))
        assert tokens_of(found) == tokens_of(alone)
        assert text_of(found) == text_of(alone)
        assert started(found).position == (1 + len(tokens) if index else 0)
        last = finished(found)
        assert (last.position, last.seq) == (1 + len(tokens) + 20, 21)
        assert last.usage == Usage(0 if index else 1 + len(tokens), 20)
    assert engine.stats().num_sessions == 0


def test_choice_of_a_text_without_a_prompt(engine: Engine) -> None:
    engine.submit(choices(2, (), seed=3), 0.0)
    events = drain(engine)
    for index, name in enumerate(("r", "r/1")):
        assert tokens_of(events[name]) == tokens_of(solo(engine, request("s", (), seed=3 + index)))


def test_prompt_is_fed_once() -> None:
    fake = FakeRuntime(tiny_tokenizer().vocab_size)
    engine = tiny_engine(runtime=fake)
    engine.submit(choices(3, tuple(range(1, 100)), max_tokens=2), 0.0)
    drain(engine)
    assert sum(map(sum, fake.calls)) == 99 + 3 * 2  # and the token that each begins with


def test_seeds_count_on_from_the_last_to_the_first(engine: Engine) -> None:
    engine.submit(choices(2, seed=2**64 - 1), 0.0)
    events = drain(engine)
    assert tokens_of(events["r/1"]) == tokens_of(solo(engine, request("s", PROMPT, seed=0)))


def test_cancel_of_one_choice_leaves_the_others(engine: Engine) -> None:
    engine.submit(choices(3, (1, 2, 3), max_tokens=30), 0.0)
    for _ in range(10):
        engine.step(0.0)
    engine.cancel("r")
    events = drain(engine)
    assert finished(events["r"]).finish_reason == "cancelled"
    for name in ("r/1", "r/2"):
        assert finished(events[name]).finish_reason == "length"


def test_every_choice_ends_where_the_prompt_is_cancelled(engine: Engine) -> None:
    """None is left waiting for a choice that will never begin."""
    engine.submit(choices(3), 0.0)
    engine.step(0.0)
    engine.cancel("r")
    events = drain(engine)
    for name in ("r", "r/1", "r/2"):
        assert finished(events[name]).finish_reason == "cancelled"
    assert finished(events["r/2"]).usage == Usage(0, 0)


def test_stop_string_ends_each_choice_separately(engine: Engine) -> None:
    engine.submit(choices(3, max_tokens=60), 0.0)
    whole = {name: text_of(events) for name, events in drain(engine).items()}
    stop = whole["r/1"][30:33]
    engine.submit(choices(3, max_tokens=60, stop=(stop,)), 0.0)
    cut = {name: text_of(events) for name, events in drain(engine).items()}
    assert cut == {name: text.partition(stop)[0] for name, text in whole.items()}


def compared(prompt: tuple[int, ...] = PROMPT, ends: tuple[tuple[int, ...], ...] = ENDS) -> Request:
    return replace(request("r", prompt, generate=False), continuations=ends, num_top=2)


def in_turn(engine: Engine, prompt: tuple[int, ...], end: tuple[int, ...]) -> object:
    """Of a session that is fed the prompt, and then asked about the continuation."""
    session = engine.kept.create("me", 0.0).session
    if prompt:
        solo(engine, request("p", prompt, session, generate=False))
    req = replace(request("e", end, session, generate=False), score=True, num_top=2)
    last = finished(solo(engine, req))
    engine.kept.delete(session, "me")
    return last.logprobs, last.tops


@pytest.mark.parametrize("prompt", [(), (7,), (7, 8), PROMPT])
def test_continuation_has_the_scores_that_it_has_after_its_prompt_alone(
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


def test_compared_prompt_counts_once(engine: Engine) -> None:
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


def test_batch_does_not_change_the_scores_of_continuations(engine: Engine) -> None:
    engine.submit(compared(), 0.0)
    alone = [finished(events).logprobs for events in drain(engine).values()]
    for n in range(3):
        engine.submit(request(f"{n}", PROMPT[n:], max_tokens=30), 0.0)
    engine.step(0.0)
    engine.submit(compared(), 0.0)
    events = drain(engine)
    assert [finished(events[name]).logprobs for name in ("r", "r/1", "r/2")] == alone


def test_continuations_end_where_the_prompt_is_cancelled(engine: Engine) -> None:
    engine.submit(compared(), 0.0)
    engine.step(0.0)
    assert engine.num_running("me") == 3
    engine.cancel("r")
    events = drain(engine)
    for name in ("r", "r/1", "r/2"):
        assert finished(events[name]).finish_reason == "cancelled"
        assert finished(events[name]).logprobs is None
