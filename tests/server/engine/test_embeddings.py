"""The mean of a text's last hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from model.ops.cpu.runtime import Runtime
from server.engine.engine import Engine
from server.engine.runner import Feed
from server.engine.types import Request, Usage
from tests.server.engine.runners import make_pool, make_runner
from tests.tiny import drain, finished, request, solo

MakeEngine = Callable[..., Engine]
PROMPT = tuple(range(1, 170))


@pytest.fixture
def runtime(backend: Runtime | None) -> Runtime | None:
    return backend


def embed(tokens: tuple[int, ...] = PROMPT, **options: object) -> Request:
    req = request("e", tokens, generate=False, **options)  # type: ignore[arg-type]
    return replace(req, embed=True)


def embedding(engine: Engine, tokens: tuple[int, ...], start: bool = True) -> tuple[float, ...]:
    found = finished(solo(engine, embed(tokens, start=start))).embedding
    assert found is not None
    return found


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 169])
def test_it_is_the_mean_over_all_tokens_the_last_one_included(
    engine: Engine, runtime: Runtime | None, length: int
) -> None:
    runner = make_runner("torch" if runtime is None else "native", make_pool())
    text = PROMPT[:length]
    states = [runner.embed(Feed(1, n, [token])) for n, token in enumerate(text)]
    found = embedding(engine, text, start=False)
    assert found == pytest.approx(np.mean(states, axis=0), abs=1e-5)
    assert any(found)


def test_start_token_is_one_of_them(engine: Engine) -> None:
    assert embedding(engine, PROMPT) == embedding(engine, (0, *PROMPT), start=False)
    assert finished(solo(engine, embed((7,)))).usage == Usage(2, 0)


def test_company_does_not_change_a_bit_of_it(engine: Engine) -> None:
    """Which shares the tokens of a step, so that others cut the text."""
    alone = embedding(engine, PROMPT)
    for n in range(3):
        engine.submit(request(f"{n}", PROMPT[n:], max_tokens=30), 0.0)
    engine.step(0.0)
    engine.submit(embed(), 0.0)
    engine.submit(replace(embed(PROMPT[5:]), request_id="f"), 0.0)
    events = drain(engine)
    assert finished(events["e"]).embedding == alone
    assert finished(events["f"]).embedding == embedding(engine, PROMPT[5:])


def test_cancelled_one_is_none(engine: Engine) -> None:
    engine.submit(embed(), 0.0)
    engine.step(0.0)
    engine.cancel("e")
    last = finished(drain(engine)["e"])
    assert (last.finish_reason, last.embedding) == ("cancelled", None)
    assert engine.stats().num_sessions == 0
