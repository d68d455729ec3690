"""Sessions of other architectures keep every promise that those of our own block keep.

So do those whose sums are in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from server.engine.engine import Engine
from tests import tiny
from tests.requirements import needs_native
from tests.server.engine.ledger import Ledger
from tests.tiny import finished, request, solo, started, state_of, tiny_runtime, tokens_of

MakeEngine = Callable[..., Engine]
PROMPT = tuple(range(1, 150))  # with the start token two chunks of the grid and a rest


NARROW = ("elu", "gated", "delta", "rwkv7", "mamba2", "mamba2_hybrid", "llama-windows")


@pytest.fixture(params=[*tiny.ARCHITECTURES, *(name + tiny.ROUNDED for name in NARROW)])
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_native)])
def make(request: pytest.FixtureRequest, architecture: str, make_engine: MakeEngine) -> MakeEngine:
    runtime = tiny_runtime(architecture) if request.param == "native" else None
    return lambda **options: make_engine(attention=architecture, runtime=runtime, **options)


@pytest.fixture
def engine(make: MakeEngine) -> Engine:
    return make()


def opened(engine: Engine) -> str:
    """A session with a prompt and 20 generated tokens."""
    session = engine.kept.create("me", 0.0).session
    solo(engine, request("r", PROMPT, session, max_tokens=20, seed=3))
    return session


def test_resumed_session_continues_as_if_never_interrupted(engine: Engine) -> None:
    whole = tokens_of(solo(engine, request(tokens=PROMPT, max_tokens=20, seed=5)))
    first = solo(engine, request(tokens=PROMPT, max_tokens=12, seed=5, keep=True))
    second = solo(engine, request("b", (), finished(first).session, max_tokens=8, seed=5))
    assert tokens_of(first) + tokens_of(second) == whole


def test_fork_continues_like_the_session(engine: Engine) -> None:
    session = opened(engine)
    (copy,) = engine.kept.fork(session, "me", 1, 0.0)
    both = [tokens_of(solo(engine, request("f", (), n))) for n in (session, copy.session)]
    assert both[0] == both[1]
    assert state_of(engine, session) == state_of(engine, copy.session)


@pytest.mark.parametrize("at", [0, 1, 65, 128, 157])
def test_rewound_session_equals_a_fresh_one(engine: Engine, at: int) -> None:
    ledger, session = Ledger(), opened(engine)
    text = [0, *PROMPT, *tokens_of(solo(engine, request(tokens=PROMPT, max_tokens=20, seed=3)))]
    ledger.take(engine.take_records())
    engine.kept.rewind(session, "me", ledger.past(session, at), 0.0)
    fresh = engine.kept.create("me", 0.0).session
    if at:
        past = request("a", text[: min(at, 150)], fresh, generate=False, start=False)
        solo(engine, past)
    for token in text[150:at]:  # generated ones were read one by one
        solo(engine, request("a", (token,), fresh, generate=False))
    ends = [solo(engine, request("r", range(40, 120), name)) for name in (fresh, session)]
    assert tokens_of(ends[0]) == tokens_of(ends[1])
    assert state_of(engine, fresh) == state_of(engine, session)


def test_sessions_that_share_slots_have_the_bits_of_solo_runs(make: MakeEngine) -> None:
    """Three turns of four sessions in two slots, so that each hibernates between its turns."""
    found = []
    for engine in (make(), make(max_sessions=2, max_asleep=4)):
        sessions = [engine.kept.create("me", 0.0).session for _ in range(4)]
        tokens = [
            tokens_of(solo(engine, request("r", range(i + 1, i + 40 + 30 * turn), session, seed=i)))
            for turn in range(3)
            for i, session in enumerate(sessions)
        ]
        found.append((tokens, [state_of(engine, session) for session in sessions]))
    assert found[0] == found[1]


def test_prefix_hit_gives_the_cold_bits(make: MakeEngine) -> None:
    cold, warm = make(), make(max_prefixes=8)
    solo(warm, request("r", PROMPT))
    tokens = (*PROMPT[:140], *range(200, 290))
    ends = [solo(engine, request("r", tokens, keep=True, seed=1)) for engine in (cold, warm)]
    assert tokens_of(ends[0]) == tokens_of(ends[1])
    states = [
        state_of(engine, str(finished(end).session))
        for engine, end in zip((cold, warm), ends, strict=True)
    ]
    assert states[0] == states[1]
    assert warm.stats().prefix_hits_total == 1
    assert started(ends[1]).position == 0
