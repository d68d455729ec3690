"""27: NaN in one row: only that session is quarantined, and its state is not saved."""

from __future__ import annotations

import numpy as np
import pytest

from model.state import StateLayout
from server.engine.engine import Engine
from server.engine.session import Saved
from server.errors import SessionNotFound
from tests.reliability.engines import BACKENDS, Model, check_baseline
from tests.server.engine.ledger import Ledger
from tests.tiny import drain, finished, poison, request, solo, tiny_checkpoint, tokens_of

PROMPT = tuple(range(1, 60))
LAYOUT = StateLayout.of(tiny_checkpoint().config)
NOT_FINITE = "the model's output is not finite"


@pytest.fixture(params=BACKENDS)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


def kept(engine: Engine) -> str:
    session = engine.kept.create("me", 0.0).session
    solo(engine, request("feed", PROMPT, session, generate=False))
    return session


def check_finite(ledger: Ledger, session: str) -> None:
    for entry in ledger.entries[session]:
        if isinstance(entry, Saved) and entry.value.state is not None:
            for layer in LAYOUT.views(np.frombuffer(entry.value.state.data, np.uint8)[None]):
                assert all(np.isfinite(tensor).all() for tensor in layer.values())


def test_only_its_session_ends_and_the_others_equal_solo_runs(model: Model) -> None:
    alone = model.engine()
    peers = [request(f"{i}", range(1 + i, 40), seed=i, max_tokens=40) for i in range(4)]
    wanted = {req.request_id: tokens_of(solo(alone, req)) for req in peers}
    engine = model.engine()
    session = kept(engine)
    for req in peers[:2]:
        engine.submit(req, 0.0)
    engine.submit(request("bad", (), session, max_tokens=100), 0.0)
    for req in peers[2:]:
        engine.submit(req, 0.0)
    events = [event for _ in range(10) for event in engine.step(0.0)]
    poison(engine, session)
    while engine.has_work():
        events += engine.step(0.0)
    last = finished(event for event in events if event.request_id == "bad")
    assert (last.finish_reason, last.error) == ("error", NOT_FINITE)
    for name, tokens in wanted.items():
        assert tokens_of(e for e in events if e.request_id == name) == tokens
    with pytest.raises(SessionNotFound):
        engine.kept.info(session, "me", 0.0)
    check_baseline(engine)


def test_session_continues_from_the_last_sound_state_in_the_store(model: Model) -> None:
    wanted = tokens_of(solo(model.engine(), request("w", PROMPT, max_tokens=40)))
    engine, ledger = model.engine(save_interval=1, can_evict=True), Ledger()
    session = kept(engine)
    engine.submit(request("r", (), session, max_tokens=40), 0.0)
    seen = tokens_of(event for _ in range(15) for event in engine.step(0.0))
    poison(engine, session)
    assert finished(drain(engine)["r"]).error == NOT_FINITE
    ledger.take(engine.take_records())
    check_finite(ledger, session)
    engine.kept.restore(ledger.past(session), 0.0)
    rest = solo(engine, request("r", (), session, max_tokens=40 - len(seen)))
    assert seen + tokens_of(rest) == wanted
    check_baseline(engine)


@pytest.mark.parametrize("ends", ["saved", "evicted", "expired", "retired"])
def test_what_only_reads_is_not_saved_either(model: Model, ends: str) -> None:
    """Nothing is drawn, so it was not noticed yet that its state is lost."""
    engine, ledger = model.engine(max_sessions=1, save_interval=1, can_evict=True), Ledger()
    session = kept(engine)
    poison(engine, session)
    solo(engine, request("more", (5, 6, 7), session, generate=False))
    if ends == "evicted":
        engine.kept.create("me", 0.0)
    elif ends == "expired":
        engine.expire(1e9)
    elif ends == "retired":
        engine.kept.retire(10)
    ledger.take(engine.take_records())
    check_finite(ledger, session)
    if ends != "saved":
        engine.kept.restore(ledger.past(session), 0.0)
        rest = solo(engine, request("r", (), session))
        wanted = solo(model.engine(), request("w", (*PROMPT, 5, 6, 7)))
        assert tokens_of(rest) == tokens_of(wanted)
    engine.expire(1e12)


def test_what_is_not_finite_is_no_prefix_for_others(model: Model) -> None:
    engine = model.engine(max_prefixes=8)
    prompt = tuple(range(1, 250))
    session = engine.kept.create("me", 0.0).session
    engine.submit(request("bad", prompt, session), 0.0)
    engine.step(0.0)
    poison(engine, session)
    assert finished(drain(engine)["bad"]).error == NOT_FINITE
    wanted = tokens_of(solo(model.engine(), request("w", prompt)))
    assert tokens_of(solo(engine, request("r", prompt))) == wanted
