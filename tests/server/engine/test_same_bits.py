"""A session's tokens depend on its own inputs, seed and model alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from model.attention import MECHANISMS, spec_of
from server.engine.engine import Engine
from server.errors import SessionNotFound
from tests.requirements import needs_native
from tests.tiny import (
    ARCHITECTURES,
    drain,
    finished,
    request,
    solo,
    state_of,
    tiny_runtime,
    tokens_of,
)

MakeEngine = Callable[..., Engine]
SERVED = [name for name in MECHANISMS if spec_of(name).constant_state] + [*ARCHITECTURES]
PROMPT = tuple(range(1, 150))  # two chunks of the grid and a rest


#: One of each kind of state: sums, codes, a window, a gated sum, a matrix that is corrected, and
#: another architecture. What takes long is tried with these.
KINDS = ("elu", "vq", "window_linear", "gated", "delta", "rwkv7")

NATIVE = [pytest.param((name, "native"), marks=needs_native) for name in ARCHITECTURES]


@pytest.fixture(params=[*((name, "torch") for name in SERVED), *NATIVE], ids="-".join)
def make(request: pytest.FixtureRequest, make_engine: MakeEngine) -> MakeEngine:
    """Engines of one mechanism; tests/model/ops/cpu has what the native runtime does of each."""
    attention, backend = request.param
    runtime = tiny_runtime(attention) if backend == "native" else None
    return lambda **options: make_engine(attention=attention, runtime=runtime, **options)


@pytest.mark.slow
@pytest.mark.parametrize("attention", KINDS)
def test_same_tokens_alone_or_among_63_others(make_engine: MakeEngine, attention: str) -> None:
    engine = make_engine(attention=attention)
    alone = tokens_of(solo(engine, request("me", PROMPT, max_tokens=40, seed=7)))
    for i in range(63):
        engine.submit(request(f"other-{i}", PROMPT[i:], max_tokens=10 + i, seed=i), 0.0)
        if i == 20:
            for _ in range(15):
                engine.step(0.0)
        if i == 40:
            engine.submit(request("me", PROMPT, max_tokens=40, seed=7), 0.0)
    assert tokens_of(drain(engine)["me"]) == alone


@pytest.mark.slow
def test_same_state_bits_alone_or_among_others(make: MakeEngine) -> None:
    engine = make()

    def state(events: list[object]) -> bytes:
        return state_of(engine, str(finished(events).session))  # type: ignore[arg-type]

    alone = state(solo(engine, request("me", PROMPT, keep=True)))  # type: ignore[arg-type]
    for i in range(20):
        engine.submit(request(f"other-{i}", PROMPT[i:], max_tokens=30), 0.0)
    engine.submit(request("me", PROMPT, keep=True), 0.0)
    assert state(drain(engine)["me"]) == alone  # type: ignore[arg-type]


def test_slots_carry_nothing_over(make: MakeEngine) -> None:
    fresh = make(max_sessions=1)
    wanted = tokens_of(solo(fresh, request(tokens=PROMPT, seed=2)))
    used = make(max_sessions=1)
    used._pool.blocks.view(np.float32).fill(float("nan"))
    assert tokens_of(solo(used, request(tokens=PROMPT, seed=2))) == wanted
    assert tokens_of(solo(used, request(tokens=PROMPT, seed=2))) == wanted


def test_other_requests_in_one_batch_survive_a_row_of_nan(make_engine: MakeEngine) -> None:
    engine = make_engine()
    alone = tokens_of(solo(engine, request("good", max_tokens=20)))
    bad = engine.kept.create("me", 0.0).session
    solo(engine, request("feed", (5, 6), bad, generate=False))
    engine._pool.blocks[0].view(np.float32).fill(float("nan"))
    engine.submit(request("good", max_tokens=20), 0.0)
    engine.submit(request("bad", (), bad, max_tokens=20), 0.0)
    events = drain(engine)
    assert finished(events["bad"]).finish_reason == "error"
    with pytest.raises(SessionNotFound):
        engine.kept.info(bad, "me", 0.0)
    assert tokens_of(events["good"]) == alone


def in_process(threads: int) -> list[int]:
    """The tokens that a process with this many threads generates."""
    code = f"""
import json, torch
from tests.tiny import drain, request, tiny_engine, tokens_of
torch.set_num_threads({threads})
engine = tiny_engine()
for i in range(5):
    engine.submit(request(str(i), range(1, 100 - i), seed=i, max_tokens=12), 0.0)
print(json.dumps([tokens_of(events) for events in drain(engine).values()]))
"""
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    return list(json.loads(output))


@pytest.mark.process
@pytest.mark.timeout(600)  # two threads that wait for each other on busy cores
def test_same_tokens_with_one_thread_or_two() -> None:
    assert in_process(1) == in_process(2)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
