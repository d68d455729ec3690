"""The same bits, whichever way a session has come to where it is.

Each column of the table ends with a session that has had the same two turns as a
cold one; its tokens and its state must be equal to the last bit. A new way is one
function with a line in `WAYS`; it gets the model and a session's first turn has
been had by whoever it asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from server.engine.engine import Engine
from server.engine.session import Past
from server.errors import InternalFailure
from server.store.base import Identity
from server.store.sqlite.store import open_store
from server.store.states import export_session, import_session
from tests.chosen_model import CHOSEN, chosen_model
from tests.reliability.engines import BACKENDS, Model
from tests.server.engine.drafters import ScriptedDrafter, head_drafter, model_drafter
from tests.server.engine.ledger import Ledger
from tests.tiny import (
    drain,
    finished,
    request,
    solo,
    started,
    state_of,
    tiny_tokenizer,
    tokens_of,
)

ATTENTIONS = [
    "elu",
    "gated",
    "vq",
    "window_linear",
    "rwkv7",
    "mamba2",
    "qwen35",
    "qwen35-slide",
    "lfm3",
    "mamba2_hybrid",
    "jamba",
    "llama-windows",
    *([CHOSEN] if chosen_model() else []),
]
#: Past the windows, several chunks of the grid and a rest.
FIRST, SECOND = tuple(range(1, 150)), tuple(range(100, 140))
OPTIONS = {"seed": 6, "repetition_penalty": 1.2}
NUM_FIRST, NUM_SECOND = 20, 20

KEY = b"k" * 32

#: Tokens of the second turn, and the state after it.
Bits = tuple[list[int], bytes]


def begin(engine: Engine) -> str:
    """A session that has had its first turn."""
    session = engine.kept.create("me", 0.0).session
    solo(engine, request("first", FIRST, session, max_tokens=NUM_FIRST, **OPTIONS))
    return session


def end(engine: Engine, session: str) -> Bits:
    """The second turn."""
    req = request("second", SECOND, session, max_tokens=NUM_SECOND, **OPTIONS)
    return tokens_of(solo(engine, req)), state_of(engine, session)


def disturb(engine: Engine) -> None:
    """Others come and go."""
    for i in range(3):
        engine.submit(request(f"{i}", FIRST[i:], seed=i, max_tokens=5), 0.0)
    drain(engine)


def ledger_of(engine: Engine) -> Ledger:
    ledger = Ledger()
    ledger.take(engine.take_records())
    return ledger


def cold(model: Model) -> Bits:
    engine = model.engine()
    return end(engine, begin(engine))


def after_a_known_prefix(model: Model) -> Bits:
    engine = model.engine(max_prefixes=8)
    solo(engine, request("warm", FIRST[:140], max_tokens=1))
    bits = end(engine, begin(engine))
    assert engine.stats().prefix_hits_total == 1
    return bits


def in_company(model: Model) -> Bits:
    engine = model.engine()
    for i in range(5):
        engine.submit(request(f"{i}", FIRST[i:], seed=i, max_tokens=60), 0.0)
        engine.step(0.0)
    return end(engine, begin(engine))


def forked(model: Model) -> Bits:
    engine = model.engine()
    (copy,) = engine.kept.fork(begin(engine), "me", 1, 0.0)
    return end(engine, copy.session)


def forked_in_the_past(model: Model) -> Bits:
    engine = model.engine()
    session = begin(engine)
    at = engine.kept.info(session, "me", 0.0).position
    solo(engine, request("other", FIRST, session))
    past = ledger_of(engine).past(session, at)
    (copy,) = engine.kept.fork(session, "me", 1, 0.0, past)
    return end(engine, copy.session)


def rewound(model: Model) -> Bits:
    engine = model.engine()
    session = begin(engine)
    at = engine.kept.info(session, "me", 0.0).position
    solo(engine, request("other", FIRST, session))
    engine.kept.rewind(session, "me", ledger_of(engine).past(session, at), 0.0)
    return end(engine, session)


def rewound_into_what_it_generated(model: Model) -> Bits:
    """And made to generate it again."""
    engine = model.engine()
    session, at = begin(engine), 1 + len(FIRST) + 11
    engine.kept.rewind(session, "me", ledger_of(engine).past(session, at), 0.0)
    solo(engine, request("again", (), session, max_tokens=NUM_FIRST - 11, **OPTIONS))
    return end(engine, session)


def slept(model: Model) -> Bits:
    """Before its second turn, and twice within it."""
    engine = model.engine(max_sessions=1, max_asleep=3)
    session = begin(engine)
    disturb(engine)
    assert engine.stats().num_asleep == 1
    req = request("second", SECOND, session, max_tokens=NUM_SECOND, **OPTIONS)
    engine.submit(req, 0.0)
    events = []
    for _ in range(2):
        events += [event for _ in range(8) for event in engine.step(0.0)]
        engine.park("second")
        disturb(engine)
        engine.unpark("second")
    events += drain(engine)["second"]
    return tokens_of(events), state_of(engine, session)


def evicted_and_restored(model: Model) -> Bits:
    engine, heir = model.engine(max_sessions=1, can_evict=True), model.engine()
    session = begin(engine)
    engine.kept.create("me", 0.0)
    heir.kept.restore(ledger_of(engine).past(session), 0.0)
    return end(heir, session)


def rebuilt_from_the_log(model: Model) -> Bits:
    engine, heir = model.engine(), model.engine()
    session = begin(engine)
    past = ledger_of(engine).past(session)
    assert past.value.position == 0
    heir.kept.restore(past, 0.0)
    return end(heir, session)


def rebuilt_from_a_save_and_the_log(model: Model) -> Bits:
    engine, heir = model.engine(save_interval=60), model.engine()
    session = begin(engine)
    past = ledger_of(engine).past(session)
    assert 0 < past.value.position < past.value.length
    heir.kept.restore(past, 0.0)
    return end(heir, session)


def restarted_at_every_turn(model: Model, save_interval: int) -> Bits:
    """Its second turn is cut off again and again, wherever that comes, and all but the log lost."""
    engine, ledger = model.engine(save_interval=save_interval), Ledger()
    session = begin(engine)
    engine.submit(request("second", SECOND, session, max_tokens=NUM_SECOND, **OPTIONS), 0.0)
    events = []
    for num_tokens in (0, 3, 11):  # within the prompt, and twice within what follows
        events += engine.step(0.0)
        while len(tokens_of(events)) < num_tokens:
            events += engine.step(0.0)
        ledger.take(engine.take_records())
        engine.kept.discard(InternalFailure("the store failed"))
        engine.kept.restore(ledger.past(session), 0.0)
        engine.unpark("second")
    assert len(tokens_of(events)) < NUM_SECOND
    events += drain(engine)["second"]
    assert finished(events).usage.completion_tokens == NUM_SECOND
    return tokens_of(events), state_of(engine, session)


def restarted_from_the_log(model: Model) -> Bits:
    return restarted_at_every_turn(model, 10**6)


def restarted_from_saves(model: Model) -> Bits:
    return restarted_at_every_turn(model, 30)


def adopted(model: Model) -> Bits:
    """As a value, by another engine."""
    engine, heir = model.engine(), model.engine()
    return end(heir, heir.kept.adopt(engine.kept.value(begin(engine), "me"), "me", 0.0).session)


def exported_and_imported(model: Model) -> Bits:
    """As a signed file."""
    engine, heir = model.engine(), model.engine()
    value = engine.kept.value(begin(engine), "me")
    assert value.state is not None
    identity = Identity("m", "t", "b", "d", len(value.state.data), "l")
    file = export_session(value, identity, KEY)
    taken = replace(import_session(file, identity, KEY), owner="me")
    return end(heir, heir.kept.adopt(taken, "me", 0.0).session)


def drafted(model: Model) -> Bits:
    """Its first turn several tokens a step, of which some are drafted wrongly, the second one not.

    Only where a chunk has the bits of single steps.
    """
    if model.backend == "torch":
        return cold(model)
    whole = solo(model.engine(), request("first", FIRST, max_tokens=NUM_FIRST, **OPTIONS))
    text = [*started(whole).start, *FIRST, *tokens_of(whole)]
    vocab_size = tiny_tokenizer().vocab_size
    engine = model.engine(drafter=ScriptedDrafter(vocab_size, {"first": text}))
    session = begin(engine)
    assert engine.stats().accepted_drafts_total and engine.stats().rejected_drafts_total
    heir = model.engine()
    return end(heir, heir.kept.adopt(engine.kept.value(session, "me"), "me", 0.0).session)


def drafted_by_a_model(model: Model) -> Bits:
    """Both turns, with the states of a model that often draws otherwise; a fork goes on."""
    if model.backend == "torch":
        return cold(model)
    engine = model.engine(drafter=model_drafter("gated"))
    (copy,) = engine.kept.fork(begin(engine), "me", 1, 0.0)
    bits = end(engine, copy.session)
    stats = engine.stats()
    assert stats.accepted_model_drafts_total + stats.rejected_model_drafts_total
    return bits


def drafted_by_a_head(model: Model) -> Bits:
    """Both turns, with a head that is mostly wrong; a fork continues where it has read nothing."""
    if model.backend == "torch" or not model.attention.startswith("qwen35"):
        return cold(model)
    drafter = head_drafter(model.attention)
    engine = model.engine(drafter=drafter, wrap=drafter.watch)
    (copy,) = engine.kept.fork(begin(engine), "me", 1, 0.0)
    bits = end(engine, copy.session)
    stats = engine.stats()
    assert stats.accepted_model_drafts_total + stats.rejected_model_drafts_total
    return bits


def stored_and_opened_again(model: Model) -> Bits:
    """All but the store's folder is lost within the second turn, as by a kill."""
    engine = model.engine(save_interval=30)
    session = begin(engine)
    num_bytes = engine.stats().state_bytes_per_session
    identity = Identity("m", "t", "b", "d", num_bytes, "l")
    with TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "store", identity)
        engine.submit(request("second", SECOND, session, max_tokens=NUM_SECOND, **OPTIONS), 0.0)
        events = []
        while len(tokens_of(events)) < 7:
            events += engine.step(0.0)
            store.commit(engine.take_records())
            store.maintain(float(len(events)))
        del engine
        store.close()
        store = open_store(Path(folder) / "store", identity)
        loaded = store.load(session, "me")
        store.close()
    assert 0 < loaded.value.position < loaded.value.position + len(loaded.entries)
    heir = model.engine()
    heir.kept.restore(Past(loaded.value, loaded.entries), 0.0)
    heir.unpark("second")
    events += drain(heir)["second"]
    return tokens_of(events), state_of(heir, session)


WAYS: dict[str, Callable[[Model], Bits]] = {
    way.__name__: way
    for way in (
        after_a_known_prefix,
        in_company,
        forked,
        forked_in_the_past,
        rewound,
        rewound_into_what_it_generated,
        slept,
        evicted_and_restored,
        rebuilt_from_the_log,
        rebuilt_from_a_save_and_the_log,
        restarted_from_the_log,
        restarted_from_saves,
        adopted,
        exported_and_imported,
        drafted,
        drafted_by_a_model,
        drafted_by_a_head,
        stored_and_opened_again,
    )
}


@cache
def cold_bits(model: Model) -> Bits:
    return cold(model)


#: The tiny model that drafts has another vocabulary than the chosen one.
CASES = [case for case in product(ATTENTIONS, WAYS) if case != (CHOSEN, "drafted_by_a_model")]


@pytest.mark.parametrize(("attention", "way"), CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_are_those_of_a_cold_session(backend: str, attention: str, way: str) -> None:
    model = Model(backend, attention)  # type: ignore[arg-type]
    tokens, state = WAYS[way](model)
    wanted = cold_bits(model)
    assert tokens == wanted[0]
    assert state == wanted[1]
