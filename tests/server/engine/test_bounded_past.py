"""Models with attention layers: at the bound a text ends, or old positions slide out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from model.state import StateLayout
from server.engine.engine import Engine
from server.engine.runner import CpuStatePool
from server.engine.session import Past, StateBlock
from server.engine.types import Request
from server.errors import ContextExceeded
from tests.requirements import needs_native
from tests.server.engine.ledger import Ledger
from tests.tiny import (
    BOUNDED,
    drain,
    finished,
    request,
    solo,
    state_of,
    tiny_checkpoint,
    tiny_runtime,
    tokens_of,
)

MakeEngine = Callable[..., Engine]
CONTEXT, _ = BOUNDED["qwen35-short"]
LAYOUT = StateLayout.of(tiny_checkpoint("qwen35-short").config)
SLIDING = StateLayout.of(tiny_checkpoint("qwen35-slide").config)


@pytest.fixture
def make(backend: str, make_engine: MakeEngine) -> MakeEngine:
    """Engines of a model of `tests.tiny.BOUNDED`, by its name."""

    def made(name: str, **options: object) -> Engine:
        runtime = tiny_runtime(name) if backend == "native" else None
        return make_engine(attention=name, runtime=runtime, **options)

    return made


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_native)])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(make: MakeEngine) -> Engine:
    return make("qwen35-short")


#: Torch sums over all places of the context, and has a grid for prompts.
only_native = pytest.mark.parametrize(
    "backend", [pytest.param("native", marks=needs_native)], indirect=True
)


@pytest.mark.parametrize("num_prompt", [1, 10, CONTEXT - 2])
def test_text_ends_at_the_bound(engine: Engine, num_prompt: int) -> None:
    """The start token counts."""
    events = solo(engine, request(tokens=range(1, num_prompt + 1), max_tokens=1000, keep=True))
    end = finished(events)
    assert end.finish_reason == "length"
    assert len(tokens_of(events)) == CONTEXT - 1 - num_prompt
    assert end.position == CONTEXT


def test_text_that_ends_before_the_bound_is_what_it_is_without(make: MakeEngine) -> None:
    ends = [
        tokens_of(solo(make(name), request(max_tokens=40)))
        for name in ("qwen35", "qwen35-short", "qwen35-slide")
    ]
    assert len(ends[0]) == 40
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize(
    "asked",
    [
        request("r", range(1, CONTEXT)),
        request("r", range(1, CONTEXT + 1), start=False),
        Request("r", "me", tuple(range(1, 201)), None, None, False, True),
        Request("r", "me", (1,), None, continuations=((2,), tuple(range(1, CONTEXT)))),
    ],
    ids=["prompt", "without a start token", "append", "continuations"],
)
def test_text_that_does_not_fit_is_refused_with_the_numbers(engine: Engine, asked: Request) -> None:
    with pytest.raises(
        ContextExceeded, match=rf"would have \d+ tokens.* context is {CONTEXT} "
    ) as e:
        engine.submit(asked, 0.0)
    assert e.value.param == "prompt"
    assert engine.stats().num_sessions == 0
    assert len(tokens_of(solo(engine, request(max_tokens=5)))) == 5


def test_text_that_is_only_read_may_fill_the_context(engine: Engine) -> None:
    session = engine.kept.create("me", 0.0).session
    solo(engine, request("r", range(1, CONTEXT), session, generate=False))
    assert engine.kept.info(session, "me", 0.0).position == CONTEXT
    embedded = Request("e", "me", tuple(range(1, CONTEXT)), None, start=True, embed=True)
    assert len(finished(solo(engine, embedded)).embedding or ()) == 32


def test_full_session_is_refused_more_and_its_past_is_not(engine: Engine) -> None:
    ledger, session = Ledger(), engine.kept.create("me", 0.0).session
    solo(engine, request("r", max_tokens=1000, session=session))
    ledger.take(engine.take_records())
    with pytest.raises(
        ContextExceeded, match=f"have {CONTEXT + 1} tokens, {CONTEXT} of them before"
    ):
        engine.submit(request("more", (), session), 0.0)
    (copy,) = engine.kept.fork(session, "me", 1, 0.0, ledger.past(session, 40))
    engine.kept.rewind(session, "me", ledger.past(session, 40), 0.0)
    ends = [solo(engine, request("r", (), name, max_tokens=9)) for name in (session, copy.session)]
    assert tokens_of(ends[0]) == tokens_of(ends[1])
    assert state_of(engine, session) == state_of(engine, copy.session)


def test_session_that_is_too_long_for_a_smaller_context_is_refused(make: MakeEngine) -> None:
    large, small = make("qwen35"), make("qwen35-short")
    session = large.kept.create("me", 0.0).session
    solo(large, request("r", range(1, 90), session))
    value = large.kept.value(session, "me")
    for call in (
        lambda: small.kept.restore(Past(value), 0.0),
        lambda: small.kept.adopt(value, "me", 0.0),
    ):
        with pytest.raises(ContextExceeded, match=f"has 98 tokens; .* context is {CONTEXT} "):
            call()
    assert small.stats().num_sessions == 0


@only_native
def test_session_continues_under_another_bound_to_the_bit(make: MakeEngine) -> None:
    """Its state has the same bytes: the used part of a block does not depend on the bound."""
    ends = []
    for name in ("qwen35-short", "qwen35"):
        short, engine = make("qwen35-short"), make(name)
        session = short.kept.create("me", 0.0).session
        solo(short, request("r", range(1, 21), session))
        engine.kept.restore(Past(short.kept.value(session, "me")), 0.0)
        ends.append((tokens_of(solo(engine, request("r", (), session))), state_of(engine, session)))
    assert ends[0] == ends[1]


def test_state_has_the_bytes_of_its_text(engine: Engine) -> None:
    session = engine.kept.create("me", 0.0).session
    for count, blocks in ((3, 1), (12, 1), (1, 2), (16, 3)):
        solo(engine, request("r", range(1, count + 1), session, generate=False, start=False))
        solo(engine, request("g", (), session, max_tokens=1))
        state = state_of(engine, session)
        assert len(state) == LAYOUT.fixed_bytes + blocks * LAYOUT.group_bytes, count
        assert engine.kept.info(session, "me", 0.0).state_bytes == len(state)


@only_native
def test_sliding_text_has_no_end_and_no_more_bytes(make: MakeEngine) -> None:
    """Any cut of the prompt, and a session that sleeps in between, gives the same."""
    tokens = tuple(range(1, 150))
    found = []
    for parts in ((tokens,), (tokens[:33], tokens[33:70], tokens[70:])):
        engine = make("qwen35-slide", max_sessions=1, max_asleep=4)
        session = engine.kept.create("me", 0.0).session
        for part in parts:
            solo(engine, request("p", part, session, generate=False))
            solo(engine, request("other", (7, 8), max_tokens=3))  # takes the slot
        found.append(
            (tokens_of(solo(engine, request("r", (), session, max_tokens=100, seed=4))),
             state_of(engine, session))
        )  # fmt: skip
    assert found[0] == found[1]
    assert len(found[0][0]) == 100
    assert len(found[0][1]) == SLIDING.num_bytes


def test_states_of_sleeping_sessions_are_bounded_in_bytes(make: MakeEngine) -> None:
    """Those that have been idle for longest go to the store."""
    room = 3 * LAYOUT.used_bytes(20)
    engine = make(
        "qwen35-short",
        max_sessions=1,
        max_asleep=50,
        max_asleep_bytes=room,
        can_evict=True,
    )
    names = [engine.kept.create("me", 0.0).session for _ in range(6)]
    for name in names:
        solo(engine, request("r", range(1, 13), name, max_tokens=8))
    engine.step(0.0)
    assert [engine.kept.has(name, "me") for name in names] == [False, False, True, True, True, True]
    assert engine._sessions.asleep_bytes == room
    solo(engine, request("r", (), names[2]))
    assert engine._sessions.asleep_bytes <= room


def test_session_whose_request_is_on_its_way_stays(make: MakeEngine) -> None:
    """Also where no state fits but in the slots: one that is asleep, and one just restored."""
    engine, ledger = make("qwen35-short", max_sessions=1, max_asleep=4, can_evict=True), Ledger()
    tight = make("qwen35-short", max_sessions=1, max_asleep=4, max_asleep_bytes=0, can_evict=True)
    names = [engine.kept.create("me", 0.0).session for _ in range(3)]
    for name in names:
        solo(engine, request("r", range(1, 13), name, max_tokens=8))
    ledger.take(engine.take_records())
    for name in names:
        tight.kept.restore(ledger.past(name), 0.0)
    assert len(tokens_of(solo(tight, request("r", (), names[0])))) == 8
    tight.step(0.0)
    assert tight.kept.has(names[2], "me")
    tight.kept.restore(ledger.past(names[1]), 0.0)
    tight.step(0.0)
    assert len(tokens_of(solo(tight, request("r", (), names[1])))) == 8


@only_native
def test_prefixes_are_bounded_in_bytes(make: MakeEngine) -> None:
    room = 2 * LAYOUT.used_bytes(48)
    engine = make("qwen35-short", max_prefixes=50, max_prefix_bytes=room)
    for first in range(1, 6):
        solo(engine, request("r", (first, *range(100, 145)), max_tokens=2))
    assert engine.stats().prefix_entries == 2
    tight = make("qwen35-short", max_prefixes=50, max_prefix_bytes=room // 3)
    solo(tight, request("r", range(100, 145), max_tokens=2))
    assert tight.stats().prefix_entries == 0


def test_request_that_was_cut_off_ends_at_the_same_bound(make: MakeEngine) -> None:
    whole = tokens_of(solo(make("qwen35-short"), request(max_tokens=1000, seed=1)))
    engine, other = (make("qwen35-short") for _ in range(2))
    session = engine.kept.create("me", 0.0).session
    engine.submit(request("r", session=session, max_tokens=1000, seed=1), 0.0)
    events = [event for _ in range(30) for event in engine.step(0.0)]
    other.kept.restore(Past(engine.kept.value(session, "me")), 0.0)
    engine.cancel("r")
    drain(engine)
    other.continue_unattended(session, "me")
    (rest,) = drain(other).values()
    assert tokens_of(events) + tokens_of(rest) == whole
    assert finished(rest).finish_reason == "length"


def test_pool_returns_the_memory_of_a_past() -> None:
    layout = dataclasses.replace(
        LAYOUT, num_groups=4096, num_bytes=LAYOUT.used_bytes(0) + 4096 * LAYOUT.group_bytes
    )
    pool = CpuStatePool(layout, 3)
    for slot in range(3):
        pool.blocks[slot].fill(slot + 1)
    pool.write(1, StateBlock(np.full(layout.used_bytes(40), 9, np.uint8)))
    assert (pool.blocks[0] == 1).all()
    assert (pool.blocks[2] == 3).all()
    used = layout.used_bytes(40)
    assert (pool.blocks[1, :used] == 9).all()
    assert not pool.blocks[1, used:].any()
    assert bytes(pool.read(1, 40).data) == b"\x09" * used
    pool.copy(0, 1, 17)
    assert (pool.blocks[1, : layout.used_bytes(17)] == 1).all()
    assert not pool.blocks[1, layout.used_bytes(17) :].any()
    pool.spares([(2, 33, 20)])
    fixed, used = layout.fixed_bytes, layout.used_bytes(33)
    pool.blocks[2, fixed:].fill(8)
    pool.restore(2)
    written = slice(layout.used_bytes(32), layout.used_bytes(53))
    assert (pool.blocks[2, fixed : written.start] == 8).all()
    assert (pool.blocks[2, written.start : used] == 3).all()
    assert not pool.blocks[2, used : written.stop].any()
    assert (pool.blocks[2, written.stop :] == 8).all()
