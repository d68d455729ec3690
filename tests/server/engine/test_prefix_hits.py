"""A prompt whose beginning is known gives the bits that it gives when all of it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from model.native.runtime import Runtime
from server.engine.engine import Engine
from server.engine.types import Event
from tests.tiny import drain, finished, request, solo, started, state_of, tokens_of

MakeEngine = Callable[..., Engine]
SYSTEM = tuple(range(1, 170))  # with the start token 170


@pytest.fixture
def runtime(backend: Runtime | None) -> Runtime | None:
    return backend


def turn(engine: Engine, tokens: tuple[int, ...], owner: str = "me") -> tuple[list[int], bytes]:
    """What a prompt gives, to the last bit."""
    events = solo(engine, request("r", tokens, keep=True, seed=1, owner=owner))
    session = finished(events).session
    assert session is not None
    assert started(events).position == 0
    assert finished(events).usage.prompt_tokens == 1 + len(tokens)
    return tokens_of(events), state_of(engine, session, owner)


@pytest.mark.parametrize(
    "tokens",
    [
        SYSTEM,
        SYSTEM[:128],
        (*SYSTEM, 200),
        (*SYSTEM[:-1], 200),
        (*SYSTEM[:140], *range(200, 290)),
        (*SYSTEM, *range(100, 280), *range(5, 90)),
    ],
)
def test_hit_gives_the_cold_bits(make_engine: MakeEngine, tokens: tuple[int, ...]) -> None:
    cold, warm = make_engine(), make_engine(max_prefixes=8)
    turn(warm, SYSTEM)
    assert turn(warm, tokens) == turn(cold, tokens)
    stats = warm.stats()
    assert (stats.prefix_hits_total, stats.prefix_misses_total) == (1, 1)
    assert stats.prefix_saved_tokens_total >= 64


def test_prompts_that_come_at_once_all_have_the_cold_bits(make_engine: MakeEngine) -> None:
    cold, warm = make_engine(), make_engine(max_prefixes=2)
    prompts = [(*SYSTEM, *range(i, 3 * i)) for i in range(6)]
    wanted = [turn(cold, prompt)[0] for prompt in prompts]
    for _ in range(2):
        events: list[Event] = []
        for i, prompt in enumerate(prompts):
            warm.submit(request(f"{i}", prompt, seed=1), 0.0)
            events += warm.step(0.0)
        while warm.has_work():
            events += warm.step(0.0)
        found = [tokens_of(e for e in events if e.request_id == f"{i}") for i in range(6)]
        assert found == wanted


def test_another_owner_does_not_hit(make_engine: MakeEngine) -> None:
    engine = make_engine(max_prefixes=8)
    mine, theirs = turn(engine, SYSTEM), turn(engine, SYSTEM, owner="you")
    assert engine.stats().prefix_hits_total == 0
    assert mine == theirs
    turn(engine, SYSTEM, owner="you")
    assert engine.stats().prefix_hits_total == 1


def test_only_the_beginning_of_a_text_is_looked_up(make_engine: MakeEngine) -> None:
    engine = make_engine(max_prefixes=8)
    session = engine.kept.create("me", 0.0).session
    for _ in range(2):
        solo(engine, request("r", SYSTEM, session))
    stats = engine.stats()
    assert (stats.prefix_hits_total, stats.prefix_misses_total) == (0, 1)


def test_entry_outlives_its_session(make_engine: MakeEngine) -> None:
    """And is not changed by the sessions that went on from it."""
    cold, warm = make_engine(), make_engine(max_prefixes=8, max_sessions=1)
    for _ in range(3):
        events = solo(warm, request("r", SYSTEM, seed=1))
        assert tokens_of(events) == turn(cold, SYSTEM)[0]


def test_choices_share_what_is_known_and_add_to_it(make_engine: MakeEngine) -> None:
    """On a grid their prompt's end is no place for an entry: other prompts continue differently."""
    cold, warm = make_engine(), make_engine(max_prefixes=8)
    for _ in range(2):
        warm.submit(replace(request("c", SYSTEM, seed=1), num_choices=2), 0.0)
        assert tokens_of(drain(warm)["c"]) == turn(cold, SYSTEM)[0]
    longer = (*SYSTEM, *range(100, 290))
    assert turn(warm, longer) == turn(cold, longer)
    assert warm.stats().prefix_hits_total == 2


def test_append_is_looked_up_too(make_engine: MakeEngine) -> None:
    cold, warm = make_engine(), make_engine(max_prefixes=8)
    found = []
    for engine in (cold, warm, warm):
        session = engine.kept.create("me", 0.0).session
        solo(engine, request("a", SYSTEM, session, generate=False))
        found.append(
            (tokens_of(solo(engine, request("r", (), session))), state_of(engine, session))
        )
    assert found[0] == found[1] == found[2]
    assert warm.stats().prefix_hits_total == 1


@pytest.mark.parametrize("max_prefixes", [3, 8])
def test_conversation_reads_from_the_place_that_it_asked_to_keep(
    make_engine: MakeEngine, max_prefixes: int
) -> None:
    """Each prompt ends with what the next one has not. It does not push itself out."""
    cold, warm = make_engine(), make_engine(max_prefixes=max_prefixes)
    said, reread = tuple(range(5, 90)), []
    for turn_number in range(20):
        asked = (*said, *range(200, 240))
        wanted = replace(request("r", (*asked, *range(100, 110)), seed=1), cache_at=(len(asked),))
        events = solo(warm, wanted)
        assert tokens_of(events) == tokens_of(solo(cold, wanted))
        usage = finished(events).usage
        reread.append(usage.prompt_tokens - usage.cached_tokens)
        assert warm.stats().prefix_entries <= max_prefixes
        said = (*asked, *range(120 + turn_number, 150))
    assert max(reread[1:]) <= 40 + 30 + 10 + 64, reread  # as far back as the grid reaches
