"""30: slots poisoned, then allocated: output equals a fresh process.

Another tenant's bytes must never show, whatever brings a state into a slot: the
zeros of a new session, sleep, a fork, a known prefix, a store.
"""

from __future__ import annotations

import numpy as np
import pytest

from model.attention import MECHANISMS, spec_of
from server.engine.engine import Engine
from tests.reliability.engines import BACKENDS, Model, check_baseline
from tests.server.engine.ledger import Ledger
from tests.tiny import ARCHITECTURES, finished, request, solo, state_of, tokens_of

SERVED = [name for name in MECHANISMS if spec_of(name).constant_state] + [*ARCHITECTURES]
PROMPT = tuple(range(1, 150))


def poison_free_slots(engine: Engine) -> None:
    """With NaN in every place, as far as a float32 or float64 goes."""
    held = {session.slot for session in engine._sessions}
    for slot in range(engine._pool.num_slots):
        if slot not in held:
            engine._pool.blocks[slot].view(np.float64).fill(np.nan)


def turn(engine: Engine, *, poisoned: bool, **options: object) -> list[int]:
    if poisoned:
        poison_free_slots(engine)
    return tokens_of(solo(engine, request(**options)))  # type: ignore[arg-type]


@pytest.mark.parametrize("attention", SERVED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_poisoned_slot_gives_what_a_fresh_one_gives(backend: str, attention: str) -> None:
    model = Model(backend, attention)  # type: ignore[arg-type]
    engine = model.engine(max_sessions=1)
    fresh = turn(engine, poisoned=False, tokens=PROMPT, seed=2)
    for _ in range(2):
        assert turn(engine, poisoned=True, tokens=PROMPT, seed=2) == fresh
    check_baseline(engine)


def life(model: Model, *, poisoned: bool) -> list[object]:
    """Two tenants whose sessions come into slots in every way; all that they see."""
    engine = model.engine(max_sessions=2, max_asleep=1, max_prefixes=4, can_evict=True)
    ledger = Ledger()
    seen: list[object] = []
    sessions: dict[str, str] = {}
    for round in range(3):
        for owner in ("ann", "bob", "eve"):
            options = {"owner": owner, "seed": round, "poisoned": poisoned}
            if round == 0:
                sessions[owner] = engine.kept.create(owner, 0.0).session
            session = sessions[owner]
            ledger.take(engine.take_records())
            engine.kept.restore(ledger.past(session), 0.0)
            seen.append(turn(engine, tokens=PROMPT[: 90 + round], session=session, **options))  # type: ignore[arg-type]
            seen.append(turn(engine, tokens=PROMPT, **options))  # type: ignore[arg-type]
            (copy,) = engine.kept.fork(session, owner, 1, 0.0)
            seen.append(turn(engine, tokens=(), session=copy.session, **options))  # type: ignore[arg-type]
            seen.append(state_of(engine, copy.session, owner))
            engine.kept.delete(copy.session, owner)
    stats = engine.stats()
    assert stats.prefix_hits_total and stats.evicted_sessions_total and stats.num_asleep
    check_baseline(engine)
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_way_to_fill_a_slot_overwrites_all_of_it(backend: str) -> None:
    model = Model(backend)  # type: ignore[arg-type]
    assert life(model, poisoned=True) == life(model, poisoned=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slot_of_a_failed_session_is_clean_for_the_next(backend: str) -> None:
    engine = Model(backend).engine(max_sessions=1)  # type: ignore[arg-type]
    fresh = turn(engine, poisoned=False, tokens=PROMPT)
    session = engine.kept.create("bob", 0.0).session
    solo(engine, request("a", PROMPT, session, owner="bob"))
    engine._pool.blocks[0].view(np.float64).fill(np.nan)
    assert finished(solo(engine, request("b", (1,), session, owner="bob"))).error is not None
    assert turn(engine, poisoned=False, tokens=PROMPT) == fresh
