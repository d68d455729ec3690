"""Random commands in any order: the engine keeps its books, and every session its text.

The model is a stand-in, so that each token is checked against the whole text of
its session, which so must survive sleep, eviction, forks, rewinds, restarts and
other readers. Two machines: prompts are cut anywhere, or on a grid.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.engine.engine import Engine
from server.engine.errors import (
    CapacityExhausted,
    InternalFailure,
    QueueFull,
    SessionAttached,
    SessionBusy,
    SessionNotFound,
)
from server.engine.runner import Runner
from server.engine.types import Request
from server.engine.value import StateBlock
from tests.fakes import FakeRuntime, Hashed, OnGrid
from tests.server.engine.expectation import Expectation, Text
from tests.server.engine.ledger import Ledger, rebuilt, settled
from tests.tiny import check_books, request, tiny_engine, tiny_tokenizer

R = TypeVar("R")
SLOTS, ASLEEP, RUNNING, WAITING = 3, 2, 2, 2


class EngineMachine(RuleBasedStateMachine):
    """What clients and a store do to an engine, beside what they may expect."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = tiny_tokenizer()
        self.ids, self.names = itertools.count(1), itertools.count(1)
        self.now = 0.0
        self.ledger = Ledger()
        self.expected = Expectation(self.tokenizer, bos=0)
        self.engine = self.make_engine()

    def wrap(self, runner: Runner) -> Runner:
        return runner

    def make_engine(self) -> Engine:
        return tiny_engine(
            wrap=self.wrap,
            runtime=FakeRuntime(self.tokenizer.vocab_size),
            max_sessions=SLOTS,
            max_asleep=ASLEEP,
            max_running=RUNNING,
            max_waiting=WAITING,
            session_ttl_s=50.0,
            new_id=lambda: f"session-{next(self.ids)}",
            can_evict=True,
            save_interval=20,
            max_detached_tokens=6,
            max_prefixes=3,
        )

    # Requests

    @rule(
        length=st.integers(0, 150),
        max_tokens=st.sampled_from([1, 5, 40, 700]),
        keep=st.booleans(),
        seed=st.integers(0, 9),
        owner=st.sampled_from(["ann", "bob"]),
        stop=st.sampled_from([(), ("e",), ("th", "s ")]),
    )
    def generate(
        self, length: int, max_tokens: int, keep: bool, seed: int, owner: str, stop: tuple[str, ...]
    ) -> None:
        sampling = {"max_tokens": max_tokens, "seed": seed, "stop": stop}
        self.submit(request(self.name(), [9] * length, None, keep, owner, **sampling))

    @rule(length=st.integers(1, 60), num_choices=st.integers(2, 3))
    def generate_choices(self, length: int, num_choices: int) -> None:
        self.submit(replace(request(self.name(), [9] * length), num_choices=num_choices))

    @precondition(lambda self: self.kept())
    @rule(data=st.data(), length=st.integers(0, 70), generate=st.booleans())
    def go_on(self, data: st.DataObject, length: int, generate: bool) -> None:
        session = self.any_session(data)
        tokens = [8] * (length if generate else length + 1)
        owner = self.expected.texts[session].owner
        self.submit(
            request(self.name(), tokens, session, True, owner, generate, repetition_penalty=1.1)
        )

    @precondition(lambda self: self.kept())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        session = self.any_session(data)
        text = self.expected.texts[session]

        def call() -> None:
            self.engine.cancel_session(session, text.owner)
            if text.running is not None:
                self.expected.works[text.running].cancelled = True

        self.on(session, call)

    @precondition(lambda self: self.expected.works)
    @rule(data=st.data(), verb=st.sampled_from(["park", "unpark", "detach", "cancel"]))
    def nudge(self, data: st.DataObject, verb: str) -> None:
        """What a reader does to its request, which may be asleep in the store."""
        name = data.draw(st.sampled_from(sorted(self.expected.works)))
        work = self.expected.works[name]
        work.has_reader &= verb != "detach"
        work.cancelled |= verb == "cancel" or (verb == "detach" and not work.text.keep)
        getattr(self.engine, verb)(name)

    @precondition(lambda self: self.kept())
    @rule(data=st.data(), take_over=st.booleans())
    def attach(self, data: st.DataObject, take_over: bool) -> None:
        session, name = self.any_session(data), self.name()
        text = self.expected.texts[session]

        def call() -> None:
            info = self.engine.attach(session, text.owner, name, take_over)
            assert (info.position, info.seq) == (len(text.tokens), text.seq)
            assert info.busy == (text.running is not None)
            self.expected.attach(text, name)

        try:
            self.on(session, call)
        except SessionAttached:
            assert text.running is not None
            assert self.expected.works[text.running].has_reader
            assert not take_over

    # Sessions

    @rule(owner=st.sampled_from(["ann", "bob"]))
    def create(self, owner: str) -> None:
        try:
            info = self.engine.create_session(owner, self.now)
        except CapacityExhausted:
            self.check_full()
        else:
            self.expected.texts[info.session] = Text(self.tokenizer, owner, True)

    @precondition(lambda self: self.kept())
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        session = self.any_session(data)
        text = self.expected.texts[session]

        def call() -> None:
            self.engine.delete_session(session, text.owner)
            text.keep = False
            if text.running is not None:
                self.expected.works[text.running].cancelled = True
            else:
                del self.expected.texts[session]

        self.on(session, call)

    @precondition(lambda self: self.kept())
    @rule(data=st.data(), num=st.integers(1, 3), past=st.booleans())
    def fork(self, data: st.DataObject, num: int, past: bool) -> None:
        session = self.any_session(data)
        text = self.expected.texts[session]
        at = self.any_length(data, session)

        def call() -> None:
            then = self.ledger.past(session, at) if past else None
            length = at if past else len(text.tokens)
            for info in self.engine.fork(session, text.owner, num, self.now, then):
                assert (info.position, info.seq, info.epoch) == (length, 0, 0)
                self.expected.texts[info.session] = text.copy(length)

        self.on(session, call)

    @precondition(lambda self: self.kept())
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        session = self.any_session(data)
        text, at = self.expected.texts[session], self.any_length(data, session)

        def call() -> None:
            past = self.ledger.past(session, at)
            info = self.engine.rewind(session, text.owner, past, self.now)
            text.cut(at)
            text.epoch += 1
            assert (info.position, info.seq, info.epoch) == (at, text.seq, text.epoch)

        try:
            self.on(session, call)
        except SessionBusy:
            assert text.running is not None

    # Time, and what happens to the process

    @rule(num_steps=st.sampled_from([1, 3, 30, 300]), seconds=st.sampled_from([0.0, 1.0, 60.0]))
    def work(self, num_steps: int, seconds: float) -> None:
        self.now += seconds
        self.step(num_steps)

    @rule()
    def restart(self) -> None:
        """All that is kept goes to the store, and comes back when it is wanted."""
        assert self.engine.retire(100) == 0
        self.step(1)
        self.lose_what_is_not_kept()
        self.engine = self.make_engine()

    @rule()
    def die(self) -> None:
        """Nothing is saved; the store has the log."""
        self.lose_what_is_not_kept()
        self.expected.lost.clear()
        self.engine = self.make_engine()

    @rule()
    def lose_store(self) -> None:
        """It has failed, and what the engine has of kept sessions counts no more."""
        for name in self.engine._live:
            if self.expected.works[name].text.keep:
                self.expected.lost[name] = InternalFailure
                self.expected.works[name].has_reader = False
                self.expected.works[name].started = True
        self.engine.discard_kept(InternalFailure("the store failed"))
        self.step(1)

    @invariant()
    def books_are_right(self) -> None:
        self.commit()
        check_books(self.engine)
        stats = self.engine.stats()
        assert stats.num_running <= RUNNING
        live = stats.num_running + stats.num_waiting
        assert not live or self.engine.has_work()

    @invariant()
    def sessions_can_be_built_again(self) -> None:
        for session in self.engine._sessions:
            if session.keep:
                text = self.expected.texts[session.id]
                value = self.engine.value(session.id, text.owner)
                wanted = settled(value, hashed)
                assert wanted[0] == text.hashed
                pasts = list(self.ledger.pasts(session.id))
                for past in (pasts[0], pasts[-1]):
                    assert settled(rebuilt(past, self.tokenizer), hashed) == wanted

    def teardown(self) -> None:
        """Every request comes to its end, wherever it is."""
        self.step(1)
        for name in sorted(self.expected.works):
            self.engine.unpark(name)
        self.finish()
        for session in self.kept():
            text = self.expected.texts[session]
            while text.running is not None:
                assert self.on(session, lambda s=session, t=text: self.read_on(s, t))  # type: ignore[misc]
                self.finish()
        assert not self.expected.works
        assert not self.expected.lost
        self.engine.expire(self.now + 1e6)
        stats = self.engine.stats()
        assert stats.held_slots == stats.num_sessions == 0

    # What the rules have in common

    def read_on(self, session: str, text: Text) -> bool:
        name = self.name()
        self.engine.attach(session, text.owner, name, take_over=True)
        self.expected.attach(text, name)
        self.engine.unpark(name)
        return True

    def submit(self, req: Request) -> None:
        try:
            if req.session is None:
                self.engine.submit(req, self.now)
            elif not self.on(req.session, lambda: self.engine.submit(req, self.now) or True):
                return
        except CapacityExhausted:
            self.check_full()
        except QueueFull:
            stats = self.engine.stats()
            assert stats.num_running + stats.num_waiting >= RUNNING + WAITING
        except SessionBusy:
            assert req.session is not None
            assert self.expected.texts[req.session].running is not None
        else:
            self.expected.submit(req)
            self.commit()
            if req.keep and req.session is None:  # the store knows its name before the client does
                (session,) = self.ledger.entries.keys() - self.expected.texts.keys()
                self.expected.texts[session] = self.expected.works[req.request_id].text

    def on(self, session: str, call: Callable[[], R]) -> R | None:
        """What ``call`` gives, with the session fetched first where it is away."""
        self.commit()
        try:
            return call()
        except SessionNotFound:
            past = self.ledger.past(session)
            try:
                self.engine.restore(past, self.now)
            except CapacityExhausted:
                self.check_full()
                return None
            self.commit()
            progress = rebuilt(past, self.tokenizer).progress
            self.expected.restore(session, progress and progress.request.request_id)
            return call()
        except CapacityExhausted:
            self.check_full()
            return None

    def finish(self) -> None:
        """A request makes a step's worth of progress in each; none is left behind."""
        self.step(5000)
        assert not self.engine.has_work()

    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if not self.engine.has_work():
                self.engine.step(self.now)
                break
            events = self.engine.step(self.now)
            self.commit()
            for event in events:
                self.expected.take(event)

    def commit(self) -> None:
        self.ledger.take(self.engine.take_records())

    def lose_what_is_not_kept(self) -> None:
        works, texts = self.expected.works, self.expected.texts
        self.expected.works = {name: work for name, work in works.items() if work.text.keep}
        self.expected.texts = {id: text for id, text in texts.items() if text.keep}
        for work in self.expected.works.values():
            work.started, work.has_reader = True, False

    def check_full(self) -> None:
        assert self.engine.stats().num_sessions == SLOTS + ASLEEP

    def name(self) -> str:
        return f"r{next(self.names)}"

    def kept(self) -> list[str]:
        return sorted(id for id, text in self.expected.texts.items() if text.keep)

    def any_session(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(self.kept()))

    def any_length(self, data: st.DataObject, session: str) -> int:
        """One that the session's text has had since it was opened."""
        self.commit()
        opened = self.ledger.entries[session][0]
        return data.draw(st.integers(opened.value.length, len(self.expected.texts[session].tokens)))  # type: ignore[union-attr]


def hashed(state: StateBlock | None, unseen: Sequence[int]) -> Hashed:
    start = () if state is None else state.data.view(np.int64)[:2].tolist()
    return Hashed(*start).after(unseen)


EngineMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_engine_machine = EngineMachine.TestCase


class GridMachine(EngineMachine):
    """As on torch."""

    def wrap(self, runner: Runner) -> Runner:
        return OnGrid(runner)


GridMachine.TestCase.settings = EngineMachine.TestCase.settings
test_engine_machine_on_a_grid = GridMachine.TestCase
