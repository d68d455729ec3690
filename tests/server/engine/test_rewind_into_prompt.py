"""A rewind into a long prompt, and what follows it, begin at the save before that place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from server.engine.engine import Engine
from server.engine.session import Past, Saved
from tests.requirements import needs_native
from tests.server.engine.grammars import VOCAB_SIZE, FakeMatchers
from tests.server.engine.ledger import Ledger
from tests.server.engine.reading import ReadingRuntime
from tests.server.engine.remembering import RememberingRuntime
from tests.tiny import request, solo, state_of, tiny_checkpoint, tiny_runtime, tokens_of

MakeEngine = Callable[[], Engine]
#: What a stand-in marks its past with depends on how a text was cut; its first numbers do not.
STAND_IN_BYTES = 16
#: A start token comes before it. No more than a bounded past has room for.
PROMPT = tuple(range(1, 181))
TEXT = (0, *PROMPT)

KINDS = [
    "stand-in",
    "stand-in stop",
    "stand-in slide",
    "torch",
    *(pytest.param(kind, marks=needs_native) for kind in ("native", "native stop", "native slide")),
]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, make_engine: Callable[..., Engine]) -> MakeEngine:
    """Engines that save at each chunk of a prompt."""
    runner, _, past = request.param.partition(" ")
    attention = {"": "gated", "stop": "qwen35-machine", "slide": "qwen35-slide"}[past]
    runtime: object = None
    if runner == "native":
        runtime = tiny_runtime(attention)
    elif runner == "stand-in":
        checkpoint = tiny_checkpoint(attention)
        vocab_size = checkpoint.tokenizer.vocab_size
        runtime = ReadingRuntime(vocab_size)
        if past:
            runtime = RememberingRuntime(vocab_size, checkpoint.config)
    return lambda: make_engine(attention=attention, runtime=runtime, save_interval=16)


def appended(engine: Engine) -> tuple[str, Ledger]:
    """A session that has read the prompt in one request, and generated a token."""
    session, ledger = engine.kept.create("me", 0.0).session, Ledger()
    solo(engine, request("r", PROMPT, session, max_tokens=1))
    ledger.take(engine.take_records())
    return session, ledger


def positions(ledger: Ledger, session: str) -> list[int]:
    """Where the session was saved."""
    return [e.value.position for e in ledger.entries[session] if isinstance(e, Saved)]


def turn(engine: Engine, session: str, tokens: tuple[int, ...] = ()) -> tuple[list[int], bytes]:
    """Tokens of the session's next request, and its state after it."""
    found = tokens_of(solo(engine, request("g", tokens, session, max_tokens=6, seed=5)))
    state = state_of(engine, session)
    return found, state[:STAND_IN_BYTES] if is_stand_in(engine) else state


def is_stand_in(engine: Engine) -> bool:
    runner = engine._executor._runner
    return isinstance(getattr(runner, "_runtime", None), ReadingRuntime)


@pytest.mark.parametrize("at", [1, 60, 128, 129, 130, 165, 180, 181])
def test_no_more_is_read_than_what_follows_the_save_before(make: MakeEngine, at: int) -> None:
    engine, fresh = make(), make()
    session, ledger = appended(engine)
    other = fresh.kept.create("me", 0.0).session
    solo(fresh, request("a", TEXT[:at], other, generate=False, start=False))
    wanted = turn(fresh, other)
    saves = positions(ledger, session)
    assert 128 in saves
    (copy,) = engine.kept.fork(session, "me", 1, 0.0, ledger.past(session, at))
    engine.kept.rewind(session, "me", ledger.past(session, at), 0.0)
    num_read = at - max([0, *(position for position in saves if position < at)])
    for name in (session, copy.session):
        engine.take_usage()
        assert turn(engine, name) == wanted
        assert engine.take_usage() == {"me": num_read + 5}


def test_every_save_leads_through_later_rewinds(make: MakeEngine) -> None:
    """Also one of a text that was longer then; a save that the cuts leave nothing of is out."""
    engine = make()
    session, ledger = appended(engine)
    for at, tokens in ((170, (7, 8, 9)), (150, tuple(range(1, 30))), (165, ())):
        engine.kept.rewind(session, "me", ledger.past(session, at), 0.0)
        ledger.take(engine.take_records())
        turn(engine, session, tokens)
        ledger.take(engine.take_records())
    wanted = turn(engine, session)
    ways = list(ledger.pasts(session))
    assert any(past.value.length > 165 for past in ways)
    for past in ways:
        heir = make()
        heir.kept.restore(past, 0.0)
        assert turn(heir, session) == wanted
    for at in (140, 151, 164):
        ends = []
        for past in ledger.pasts(session, at):
            (copy,) = engine.kept.fork(session, "me", 1, 0.0, past)
            ends.append(turn(engine, copy.session))
        assert len(ends) > 1
        assert all(end == ends[0] for end in ends)


def test_part_of_a_prompt_is_under_no_grammar(
    make_engine: Callable[..., Engine], matchers: FakeMatchers
) -> None:
    """As where all of it is read again: its request was to generate after the whole prompt."""
    engine = make_engine(runtime=ReadingRuntime(VOCAB_SIZE), matchers=matchers)
    session = engine.kept.create("me", 0.0).session
    engine.submit(request("r", PROMPT, session, grammar="3"), 0.0)
    engine.step(0.0)
    value = engine.kept.value(session, "me")
    assert (value.position, value.length, value.min_length) == (128, 181, 129)
    assert value.constraint is not None
    (copy,) = engine.kept.fork(session, "me", 1, 0.0, Past(value, (), 140))
    then = engine.kept.value(copy.session, "me")
    assert (then.length, then.constraint, then.progress) == (140, None, None)
    engine.cancel("r")
    engine.step(0.0)
