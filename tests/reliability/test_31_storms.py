"""31: storms of cancels and disconnects: slots and memory back at baseline.

On the engine alone; over sockets the same is asked of the whole server.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from dataclasses import replace

import pytest

from server.engine.engine import Engine
from server.errors import RequestError
from tests.fakes import FakeEngine, FakeRuntime
from tests.reliability.engines import BACKENDS, Model
from tests.server.engine.ledger import Ledger
from tests.tiny import check_books, request, tiny_engine, tiny_tokenizer

#: What a storm may leave behind: less than one session does.
MAX_GROWTH_BYTES = 64 << 10
ENGINE = "*/server/engine/*"


class Storm:
    """Clients that come, change their minds and go, over an engine."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.random, self.now = engine, random.Random(seed), 0.0
        self.sessions: list[str] = []
        self.live: list[str] = []
        self.num_finished = self.num_refused = 0

    def blow(self, num_steps: int) -> None:
        for n in range(num_steps):
            for _ in range(self.random.randrange(4)):
                self.come(f"r{n}-{_}")
            for _ in range(self.random.randrange(4)):
                self.go()
            self.now += 0.1
            self.step()

    def come(self, name: str) -> None:
        rng = self.random
        session = rng.choice(self.sessions) if self.sessions and rng.random() < 0.3 else None
        tokens = [rng.randrange(256) for _ in range(rng.randrange(1, 200))]
        req = request(
            name, tokens, session, keep=rng.random() < 0.3, max_tokens=rng.choice([1, 10, 10**4])
        )
        if not req.keep and session is None and rng.random() < 0.2:
            req = replace(req, num_choices=3)
        try:
            self.engine.submit(req, self.now)
        except RequestError:
            self.num_refused += 1
        else:
            self.live += req.ids

    def go(self) -> None:
        """Of a client's requests and sessions, something ends."""
        rng, engine = self.random, self.engine
        if self.live:
            name = self.live.pop(rng.randrange(len(self.live)))
            verb = rng.choice([engine.cancel, engine.cancel, engine.detach, engine.park])
            verb(name)
            if verb == engine.park:
                engine.cancel(name)
        if self.sessions and rng.random() < 0.3:
            session = self.sessions.pop(rng.randrange(len(self.sessions)))
            try:
                engine.kept.delete(session, "me")
            except RequestError:
                self.num_refused += 1

    def step(self) -> None:
        for event in self.engine.step(self.now):
            self.num_finished += type(event).__name__ in ("Finished", "Failed")
        for id, _ in self.engine.take_records():
            if id not in self.sessions:
                self.sessions.append(id)
        check_books(self.engine)

    def calm(self) -> None:
        """Everybody has gone."""
        for name in self.live:
            self.engine.cancel(name)
        while self.engine.has_work():
            self.step()
        self.engine.expire(self.now + 1e6)
        self.engine.take_records()
        self.sessions.clear()
        self.live.clear()


def check_calm(engine: Engine) -> None:
    stats = engine.stats()
    assert stats.held_slots == stats.num_sessions == stats.num_asleep == 0
    assert stats.num_running == stats.num_waiting == stats.num_parked == 0
    assert engine.next_expiry() is None
    assert not list(engine._requests)
    assert not engine._requests.cancelled


OPTIONS = {
    "max_sessions": 6,
    "max_asleep": 6,
    "max_running": 4,
    "max_waiting": 30,
    "max_detached_tokens": 20,
}


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_left_after_a_storm(seed: int) -> None:
    runtime = FakeRuntime(tiny_tokenizer().vocab_size)
    engine = tiny_engine(runtime=runtime, max_prefixes=4, **OPTIONS)
    storm = Storm(engine, seed)
    storm.blow(400)
    assert storm.num_finished > 200
    assert storm.num_refused > 20
    storm.calm()
    check_calm(engine)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_left_after_a_storm_over_a_model(backend: str) -> None:
    engine = Model(backend).engine(max_prefixes=4, **OPTIONS)  # type: ignore[arg-type]
    storm = Storm(engine, 5)
    storm.blow(40)
    storm.calm()
    check_calm(engine)


def test_memory_is_back_at_its_baseline() -> None:
    engine = FakeEngine(session_ttl_s=60.0, max_prefixes=4, **OPTIONS)
    storm = Storm(engine, 1)
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(3):
            storm.blow(150)
            storm.calm()
            gc.collect()
            # Of the engine's code alone: other threads of this process allocate as they like.
            engines = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, ENGINE)])
            sizes.append(sum(trace.size for trace in engines.traces))
    finally:
        tracemalloc.stop()
    check_calm(engine)
    assert sizes[2] - sizes[0] < MAX_GROWTH_BYTES, sizes


def test_sessions_evicted_during_a_storm_are_restored_whole() -> None:
    engine = FakeEngine(session_ttl_s=5.0, can_evict=True, **OPTIONS)
    ledger = Ledger()
    names = [engine.kept.create("me", 0.0).session for _ in range(12)]
    ledger.take(engine.take_records())
    rng, now = random.Random(3), 0.0
    for n in range(300):
        now += 1.0
        session = rng.choice(names)
        try:
            engine.kept.restore(ledger.past(session), now)
            engine.submit(request(f"{n}", [rng.randrange(256)] * 9, session, max_tokens=50), now)
        except RequestError:
            pass
        for live in list(engine._requests)[:: rng.randrange(1, 3)]:
            engine.cancel(live.request.request_id)
        for _ in range(rng.randrange(5)):
            engine.step(now)
        ledger.take(engine.take_records())
    for name in names:
        engine.expire(now + 1e6)
        ledger.take(engine.take_records())
        info = engine.kept.restore(ledger.past(name), now + 1e6)
        if info.parked:
            engine.cancel_session(name, "me")
        while engine.has_work():
            engine.step(now + 1e6)
    check_books(engine)
