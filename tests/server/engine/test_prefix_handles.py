"""A prompt that continues a prefix by its handle gives the bits of the whole text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from model.native.runtime import Runtime
from server.engine.engine import Engine
from server.engine.prefixes import PrefixHandle, PrefixNotFound
from server.engine.session import Past
from server.engine.types import Request, SamplingParams
from server.errors import InvalidRequest
from tests.requirements import needs_native
from tests.tiny import drain, finished, request, solo, started, state_of, tokens_of

MakeEngine = Callable[..., Engine]
SYSTEM = tuple(range(1, 170))  # with the start token 170
ASKED = tuple(range(200, 220))
PENALTIES = SamplingParams(max_tokens=12, seed=1, repetition_penalty=1.5, presence_penalty=1.0)


@pytest.fixture
def runtime(backend: Runtime | None) -> Runtime | None:
    return backend


def reads(tokens: tuple[int, ...], **more: object) -> Request:
    return replace(request("r", tokens, generate=False), return_prefix=True, **more)


def handle_of(engine: Engine, tokens: tuple[int, ...] = SYSTEM, **more: object) -> str:
    """That of a prompt, which is read."""
    handle = finished(solo(engine, reads(tokens, **more))).prefix
    assert handle is not None
    return handle


def answer(engine: Engine, asked: Request) -> tuple[list[int], int, bytes]:
    """What it gives, to the last bit."""
    events = solo(engine, replace(asked, keep=True, sampling=PENALTIES))
    session = finished(events).session
    assert session is not None
    return tokens_of(events), finished(events).position, state_of(engine, session)


def continuation(handle: str, tokens: tuple[int, ...] = ASKED) -> Request:
    return replace(request("r", tokens), prefix=handle)


@pytest.mark.parametrize("num_asked", [0, 1, len(ASKED)])
def test_continuation_has_the_bits_of_a_session_that_read_the_prompt(
    make_engine: MakeEngine, num_asked: int
) -> None:
    cold, warm, asked = make_engine(), make_engine(max_prefixes=8), ASKED[:num_asked]
    session = cold.kept.create("me", 0.0).session
    solo(cold, request("a", SYSTEM, session, generate=False))
    events = solo(cold, replace(request("r", asked, session), sampling=PENALTIES))
    wanted = tokens_of(events), finished(events).position, state_of(cold, session)
    handle = handle_of(warm)
    for _ in range(2):
        assert answer(warm, continuation(handle, asked)) == wanted


@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_native)], indirect=True)
def test_native_continuation_has_the_bits_of_the_whole_text(make_engine: MakeEngine) -> None:
    engine = make_engine(max_prefixes=8)
    wanted = answer(make_engine(), request("r", (*SYSTEM, *ASKED)))
    assert answer(engine, continuation(handle_of(engine))) == wanted


def test_usage_and_place_are_those_of_what_follows(make_engine: MakeEngine) -> None:
    engine = make_engine(max_prefixes=8)
    events = solo(engine, continuation(handle_of(engine)))
    assert started(events).position == 1 + len(SYSTEM)
    assert finished(events).usage.prompt_tokens == len(ASKED)
    stats = engine.stats()
    assert (stats.prefix_hits_total, stats.prefix_misses_total) == (1, 1)


def test_prompt_that_is_known_has_the_same_handle(make_engine: MakeEngine) -> None:
    """Also from what generates, and for each choice's request once."""
    engine = make_engine(max_prefixes=8)
    handle = handle_of(engine)
    assert handle_of(engine) == handle
    choices = replace(request("c", SYSTEM), return_prefix=True, num_choices=2)
    engine.submit(choices, 0.0)
    events = drain(engine)
    assert [finished(events[id]).prefix for id in ("c", "c/1")] == [handle, None]
    assert finished(solo(engine, request("r", SYSTEM))).prefix is None, "it was not asked for"


def test_handles_continue_each_other(make_engine: MakeEngine) -> None:
    long = tuple(range(30, 150))
    cold, warm = make_engine(), make_engine(max_prefixes=16)
    session = cold.kept.create("me", 0.0).session
    for part in (SYSTEM, long):
        solo(cold, request("a", part, session, generate=False))
    events = solo(cold, replace(request("r", ASKED, session), sampling=PENALTIES))
    wanted = tokens_of(events), finished(events).position, state_of(cold, session)
    second = handle_of(warm, long, prefix=handle_of(warm))
    assert answer(warm, continuation(second)) == wanted


def test_text_after_a_prefix_is_cached_apart_from_the_same_text_alone(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(max_prefixes=16)
    handle = handle_of(engine)
    alone = answer(make_engine(), replace(request("r", SYSTEM), start=False))
    cold = answer(engine, continuation(handle, SYSTEM))
    assert answer(engine, replace(request("r", SYSTEM), start=False)) == alone
    hits = engine.stats().prefix_hits_total
    assert answer(engine, continuation(handle, SYSTEM)) == cold
    assert engine.stats().prefix_hits_total == hits + 2, "the prefix, and the text after it"


def test_another_owner_has_no_such_prefix(make_engine: MakeEngine) -> None:
    engine = make_engine(max_prefixes=8)
    handle = handle_of(engine)
    with pytest.raises(PrefixNotFound, match=r"^prefix: .* return_prefix for a new handle"):
        engine.submit(replace(continuation(handle), owner="you"), 0.0)
    assert not engine.has_work()
    assert engine.stats().num_sessions == 0


def test_prefix_that_made_room_is_not_found(make_engine: MakeEngine) -> None:
    engine = make_engine(max_prefixes=1)
    handle = handle_of(engine)
    for _ in range(3):  # what is used more often is worth more
        solo(engine, request("r", tuple(range(200, 120, -1))))
    with pytest.raises(PrefixNotFound):
        engine.submit(continuation(handle), 0.0)
    with pytest.raises(PrefixNotFound):
        make_engine().submit(continuation(handle), 0.0)


@pytest.mark.parametrize("config", [{}, {"max_prefixes": 8, "max_prefix_bytes": 1}])
def test_prompt_whose_state_is_not_kept_has_no_handle(
    make_engine: MakeEngine, config: dict[str, int]
) -> None:
    assert finished(solo(make_engine(**config), reads(SYSTEM))).prefix is None


def test_short_prompt_has_no_handle(make_engine: MakeEngine) -> None:
    assert finished(solo(make_engine(max_prefixes=8), reads(SYSTEM[:20]))).prefix is None


def test_continuation_that_is_kept_outlives_the_prefix(make_engine: MakeEngine) -> None:
    """What the log has of it needs no cache, in another engine."""
    engine, other = make_engine(max_prefixes=8), make_engine()
    handle = handle_of(engine)
    wanted = answer(engine, continuation(handle))
    engine.take_records()
    solo(engine, replace(continuation(handle), keep=True, sampling=PENALTIES))
    ((id, opened), *entries) = engine.take_records()
    copy = other.kept.restore(Past(opened.value, [entry for _, entry in entries]), 0.0)
    assert copy.session == id
    assert copy.position == wanted[1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "prefix_",
        "sess_" + "A" * 48,
        "prefix_" + "A" * 40,
        "prefix_" + "A" * 43 + "=",
        "prefix_" + "A" * 47,
        "prefix_" + "A" * 47 + "!",
        "prefix_" + "é" * 48,
    ],
)
def test_what_no_server_has_given_out_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="prefix: is not a handle") as refused:
        PrefixHandle.parse(text)
    assert refused.value.param == "prefix"


def test_handle_is_read_as_it_was_written() -> None:
    for num in (1, 2, 3, 95):
        handle = PrefixHandle(bytes(range(32)), tuple(range(65_000, 65_000 + num)))
        assert PrefixHandle.parse(str(handle)) == handle
