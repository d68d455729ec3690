"""An engine in the hands of random commands: what their rules have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from server.engine.drafts import Drafter
from server.engine.engine import Engine
from server.engine.runner import Runner
from server.engine.session import StateBlock
from server.engine.types import Request
from server.errors import (
    CapacityExhausted,
    ContextExceeded,
    QueueFull,
    SessionBusy,
    SessionNotFound,
)
from tests.fakes import Hashed
from tests.server.engine.drafters import HashedDrafter
from tests.server.engine.expectation import Expectation
from tests.server.engine.grammars import FakeMatchers
from tests.server.engine.ledger import Ledger, rebuilt
from tests.server.engine.reading import ReadingRuntime
from tests.server.engine.texts import EOS, Text
from tests.tiny import tiny_engine, tiny_tokenizer

R = TypeVar("R")
SLOTS, ASLEEP, RUNNING, WAITING = 3, 2, 2, 2


class Commanded(RuleBasedStateMachine):
    """The engine, a store of all that it records, and what clients may expect of both.

    ``attention`` names the model that has the layout of states, ``longest`` how long texts may be.
    """

    attention = "gated"
    longest: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = tiny_tokenizer()
        self.ids, self.names = itertools.count(1), itertools.count(1)
        self.now = 0.0
        self.ledger = Ledger()
        self.expected = Expectation(self.tokenizer, bos=0)
        self.matchers = FakeMatchers(self.tokenizer.vocab_size, EOS)
        self.drafter = self.new_drafter()
        self.engine = self.make_engine()

    def wrap(self, runner: Runner) -> Runner:
        return runner

    def new_runtime(self) -> ReadingRuntime:
        return ReadingRuntime(self.tokenizer.vocab_size)

    def new_drafter(self) -> Drafter | None:
        return None

    def make_engine(self) -> Engine:
        engine = tiny_engine(
            self.attention,
            wrap=self.wrap,
            runtime=self.new_runtime(),
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
            matchers=self.matchers,
            drafter=self.drafter,
        )
        if isinstance(self.drafter, HashedDrafter):
            self.drafter.engine = engine
        return engine

    def read_on(self, session: str, text: Text) -> bool:
        name = self.name()
        assert self.engine.attach(session, text.owner, name, take_over=True).busy
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
        except ContextExceeded:
            assert self.room_for(req) < 0
        else:
            params = req.sampling
            if self.longest is not None:
                room = self.room_for(req)
                assert room >= 0
                if params is not None:  # one token of those that have room is counted already
                    params = replace(params, max_tokens=min(params.max_tokens, room + 1))
            self.expected.submit(replace(req, sampling=params))
            self.commit()
            if req.keep and req.session is None:  # the store knows its name before the client does
                (session,) = self.ledger.entries.keys() - self.expected.texts.keys()
                self.expected.texts[session] = self.expected.works[req.request_id].text

    def room_for(self, req: Request) -> int:
        """Tokens that still fit, once the text has those of ``req`` and one that is generated."""
        assert self.longest is not None
        before = 0 if req.session is None else len(self.expected.texts[req.session].tokens)
        start = not before and (req.start or not req.tokens)
        added = max(map(len, req.continuations), default=0) + (req.sampling is not None)
        return self.longest - before - start - len(req.tokens) - added

    def on(self, session: str, call: Callable[[], R]) -> R | None:
        """What ``call`` gives, with the session fetched first where it is away."""
        self.commit()
        try:
            return call()
        except SessionNotFound:
            past = self.ledger.past(session)
            try:
                self.engine.kept.restore(past, self.now)
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

    def check_constraint(self, session: str, past: Text | None, text: Text) -> None:
        """``text`` is the session now, as ``past`` was when it was as long."""
        self.commit()
        found = rebuilt(self.ledger.past(session), self.tokenizer).constraint
        assert past is None or past.was_under(found, len(text.tokens))
        if past is not None:
            text.go_on_under(found)

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


def asked(made: Request, reading: dict[str, object]) -> Request:
    """``made``, with what else is to be known."""
    fields = {name: value for name, value in reading.items() if name != "top_logprobs"}
    if made.sampling is not None and "top_logprobs" in reading:
        fields["sampling"] = replace(made.sampling, top_logprobs=reading["top_logprobs"])  # type: ignore[arg-type]
    return replace(made, **fields)  # type: ignore[arg-type]


def hashed(state: StateBlock | None, unseen: Sequence[int]) -> Hashed:
    start = () if state is None else np.frombuffer(state.data, np.int64)[:2].tolist()
    return Hashed(*start).after(unseen)
