"""Several continuations of one prompt, which is fed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from model.ops.cpu.runtime import Runtime
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


def test_stop_string_ends_each_choice_for_itself(engine: Engine) -> None:
    engine.submit(choices(3, max_tokens=60), 0.0)
    whole = {name: text_of(events) for name, events in drain(engine).items()}
    stop = whole["r/1"][30:33]
    engine.submit(choices(3, max_tokens=60, stop=(stop,)), 0.0)
    cut = {name: text_of(events) for name, events in drain(engine).items()}
    assert cut == {name: text.partition(stop)[0] for name, text in whole.items()}
