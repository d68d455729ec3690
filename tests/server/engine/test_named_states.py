"""A session that begins with a named state has the bits of one that read the same text itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from model.native.runtime import Runtime
from server.engine.engine import Engine
from server.engine.session import Past, SessionValue, StateBlock
from server.errors import CapacityExhausted
from server.store.states import NamedState, named_state, tuned_state
from tests.tiny import (
    drain,
    finished,
    request,
    solo,
    started,
    state_of,
    tiny_engine,
    tiny_runtime,
    tokens_of,
)

MakeEngine = Callable[..., Engine]
SYSTEM = tuple(range(1, 90))  # with the start token 90: no multiple of a chunk
OTHER = tuple(range(90, 1, -1))
ASKED = tuple(range(100, 290))


@pytest.fixture
def runtime(backend: Runtime | None) -> Runtime | None:
    return backend


def read(engine: Engine, tokens: tuple[int, ...]) -> str:
    """A session that has read ``tokens``, and nothing else."""
    session = engine.kept.create("me", 0.0).session
    solo(engine, request("read", tokens, session, generate=False))
    return session


def state_after(engine: Engine, tokens: tuple[int, ...]) -> NamedState:
    session = read(engine, tokens)
    state = named_state(engine.kept.value(session, "me"))
    engine.kept.delete(session, "me")
    return state


def tuned(engine: Engine) -> NamedState:
    """Some state that no text leads to."""
    block = np.zeros(engine._pool.layout.num_bytes, np.uint8)
    for layer in engine._pool.layout.views(block[None]):
        for tensor in layer.values():
            tensor[:] = np.linspace(-0.5, 0.5, tensor.size).reshape(tensor.shape)
    return tuned_state(StateBlock(block))


def answer(
    engine: Engine, state: NamedState | None, tokens: tuple[int, ...] = ASKED
) -> tuple[list[int], bytes]:
    """What ``tokens`` give after ``state``, to the last bit."""
    engine.submit(request("r", tokens, keep=True, seed=1), 0.0, state and state.value)
    events = drain(engine)["r"]
    session = finished(events).session
    assert session is not None
    return tokens_of(events), state_of(engine, session)


@pytest.mark.parametrize("num_asked", [0, 1, 2, 50, len(ASKED)])
def test_session_has_the_bits_of_one_that_read_the_prompt(
    make_engine: MakeEngine, num_asked: int
) -> None:
    engine, asked = make_engine(), ASKED[:num_asked]
    session = read(engine, SYSTEM)
    events = solo(engine, request("r", asked, session, seed=1))
    wanted = tokens_of(events), state_of(engine, session)
    assert answer(engine, state_after(engine, SYSTEM), asked) == wanted


def test_request_counts_the_tokens_that_it_brought(make_engine: MakeEngine) -> None:
    engine = make_engine(max_prefixes=8)
    state = state_after(engine, SYSTEM)
    for num_cached in (0, 1 + len(ASKED) - 1):
        engine.submit(request("r", ASKED), 0.0, state.value)
        events = drain(engine)["r"]
        usage = finished(events).usage
        assert usage.prompt_tokens == len(ASKED)
        assert (usage.cached_tokens > 0) == (num_cached > 0)
        assert started(events).position == 1 + len(SYSTEM)


def test_prefixes_of_two_states_are_two(make_engine: MakeEngine) -> None:
    """Also where their texts have equal lengths, and next to the text without a state."""
    cold, warm = make_engine(), make_engine(max_prefixes=32)
    states = [state_after(cold, SYSTEM), state_after(cold, OTHER), tuned(cold), None]
    wanted = [answer(cold, state) for state in states]
    assert len({tuple(tokens) for tokens, _ in wanted}) > 1
    assert len({state for _, state in wanted}) == len(states)
    for num_hits in (0, len(states)):
        assert [answer(warm, state) for state in states] == wanted
        assert warm.stats().prefix_hits_total == num_hits
    assert warm.stats().prefix_saved_tokens_total > 0


def test_prefix_after_a_state_serves_another_prompt(make_engine: MakeEngine) -> None:
    cold, warm = make_engine(), make_engine(max_prefixes=8)
    state, longer = state_after(cold, SYSTEM), (*ASKED, *range(5, 90))
    answer(warm, state)
    assert answer(warm, state, longer) == answer(cold, state, longer)
    assert warm.stats().prefix_hits_total == 1


def test_choices_continue_from_a_state(make_engine: MakeEngine) -> None:
    engine = make_engine()
    state = state_after(engine, SYSTEM)
    engine.submit(replace(request("c", ASKED, seed=1), num_choices=2), 0.0, state.value)
    assert tokens_of(drain(engine)["c"]) == answer(engine, state)[0]


def test_tuned_state_takes_the_place_of_the_start_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    state = tuned(engine)
    engine.submit(request("r", ASKED), 0.0, state.value)
    events = drain(engine)["r"]
    assert started(events).position == 0
    assert finished(events).usage.prompt_tokens == len(ASKED)
    assert answer(engine, state) != answer(engine, None)


@pytest.mark.parametrize("make", [lambda engine: state_after(engine, SYSTEM), tuned])
def test_rewind_to_the_beginning_gives_the_state(
    make_engine: MakeEngine, make: Callable[[Engine], NamedState]
) -> None:
    engine = make_engine()
    state = make(engine)
    wanted, block = answer(engine, state)[0], state.value.state
    assert block is not None
    opened = engine.kept.adopt(state.value, "me", 0.0)
    value = engine.kept.value(opened.session, "me")
    solo(engine, request("r", ASKED, opened.session))
    info = engine.kept.rewind(opened.session, "me", Past(value, (), state.num_tokens), 0.0)
    assert info.position == state.num_tokens
    assert state_of(engine, opened.session) == block.data.tobytes()
    assert tokens_of(solo(engine, request("r", ASKED, opened.session, seed=1))) == wanted


@pytest.mark.parametrize("make", [lambda engine: state_after(engine, SYSTEM), tuned])
def test_fork_of_a_new_session_begins_with_the_state(
    make_engine: MakeEngine, make: Callable[[Engine], NamedState]
) -> None:
    engine = make_engine()
    state = make(engine)
    opened = engine.kept.adopt(state.value, "me", 0.0)
    (fork,) = engine.kept.fork(opened.session, "me", 1, 0.0)
    for session in (opened.session, fork.session):
        events = solo(engine, request("r", ASKED, session, seed=1))
        assert tokens_of(events) == answer(engine, state)[0]


@pytest.mark.parametrize("num_steps", [1, 2, 9])
@pytest.mark.parametrize("make", [lambda engine: state_after(engine, SYSTEM), tuned])
def test_log_leads_from_the_state_to_the_present(
    make_engine: MakeEngine, make: Callable[[Engine], NamedState], num_steps: int
) -> None:
    """As after a crash: the value of the opening, and the entries after it."""
    engine, other = make_engine(), make_engine()
    state = make(engine)
    wanted = answer(engine, state)[0]
    engine.take_records()
    engine.submit(request("r", ASKED, keep=True, seed=1), 0.0, state.value)
    for _ in range(num_steps):
        engine.step(0.0)
    (id, opened), *rest = engine.take_records()
    assert opened.value.origin == state.value.origin  # type: ignore[union-attr]
    drain(engine)
    info = other.kept.restore(Past(opened.value, [entry for _, entry in rest]), 0.0)  # type: ignore[union-attr]
    assert info.session == id
    done = [entry.token_id for _, entry in rest if hasattr(entry, "token_id")]
    other.continue_unattended(id, "me")
    assert done + tokens_of(drain(other).get("r", ())) == wanted


def test_full_server_opens_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(max_sessions=1)
    state = state_after(engine, SYSTEM)
    engine.submit(request("first"), 0.0)
    with pytest.raises(CapacityExhausted):
        engine.submit(request("second"), 0.0, state.value)
    drain(engine)


def test_another_architecture_has_the_same_bits(backend: Runtime | None) -> None:
    runtime = None if backend is None else tiny_runtime("rwkv7")
    engine = tiny_engine("rwkv7", max_prefixes=8, runtime=runtime)
    session = read(engine, SYSTEM)
    wanted = tokens_of(solo(engine, request("r", ASKED, session, seed=1)))
    state = state_after(engine, SYSTEM)
    assert [answer(engine, state)[0] for _ in range(2)] == [wanted, wanted]
    assert engine.stats().prefix_hits_total >= 1


@pytest.mark.parametrize("attention", ["gated", "rwkv7"])
def test_backends_begin_with_the_same_tuned_state(backend: Runtime | None, attention: str) -> None:
    """Torch is the reference."""
    runtime = None if backend is None else tiny_runtime(attention)
    found = []
    for engine in (tiny_engine(attention), tiny_engine(attention, runtime=runtime)):
        state = tuned(engine)
        greedy = request("r", ASKED[:20], temperature=0, max_tokens=4)
        engine.submit(greedy, 0.0, state.value)
        found.append(tokens_of(drain(engine)["r"]))
    assert found[0] == found[1]


def test_value_without_an_origin_has_a_state_after_position_0() -> None:
    assert not SessionValue("s", "me").has_state
    assert SessionValue("s", "me", position=1).has_state
