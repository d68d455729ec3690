"""Random commands in any order: the engine keeps its books, and every request ends once."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.engine.errors import CapacityExhausted, QueueFull, SessionBusy, SessionNotFound
from server.engine.types import Event, Finished, Started, TokenEvent
from tests.fakes import FakeRuntime
from tests.tiny import request, tiny_engine, tiny_tokenizer


class EngineMachine(RuleBasedStateMachine):
    """A model of what clients may know, beside the real engine."""

    def make_runtime(self) -> FakeRuntime | None:
        return None

    def __init__(self) -> None:
        super().__init__()
        self.engine = tiny_engine(
            max_sessions=5,
            max_running=3,
            max_waiting=2,
            session_ttl_s=50.0,
            runtime=self.make_runtime(),
        )
        self.now = 0.0
        self.count = 0
        self.live: dict[str, list[Event]] = {}
        self.sessions: set[str] = set()

    @rule(
        length=st.integers(1, 150),
        max_tokens=st.integers(1, 12),
        keep=st.booleans(),
        seed=st.integers(0, 9),
    )
    def generate(self, length: int, max_tokens: int, keep: bool, seed: int) -> None:
        self._submit([9] * length, None, keep=keep, max_tokens=max_tokens, seed=seed)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), length=st.integers(0, 70), generate=st.booleans())
    def go_on(self, data: st.DataObject, length: int, generate: bool) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        tokens = [8] * (length if generate else length + 1)
        self._submit(tokens, session, generate=generate)

    @rule()
    def create(self) -> None:
        try:
            self.sessions.add(self.engine.create_session("me", self.now).session)
        except CapacityExhausted:
            assert self.engine.stats().held_slots == 5

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.cancel(data.draw(st.sampled_from(sorted(self.live))))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        self.sessions.discard(session)
        try:
            self.engine.delete_session(session, "me")
        except SessionNotFound:
            assert self.now >= 50.0  # it had expired

    @rule(num_steps=st.integers(1, 30), seconds=st.sampled_from([0.0, 1.0, 60.0]))
    def work(self, num_steps: int, seconds: float) -> None:
        self.now += seconds
        for _ in range(num_steps):
            for event in self.engine.step(self.now):
                self._take(event)

    @invariant()
    def the_books_are_right(self) -> None:
        stats = self.engine.stats()
        assert stats.held_slots == stats.num_sessions <= 5
        assert stats.num_running <= 3
        assert stats.num_waiting <= 2 + 3
        assert stats.num_running + stats.num_waiting == len(self.live)
        assert self.engine.has_work() == bool(self.live)

    def teardown(self) -> None:
        while self.engine.has_work():
            for event in self.engine.step(self.now):
                self._take(event)
        assert not self.live
        self.engine.expire(self.now + 1e6)
        assert self.engine.stats().held_slots == 0

    def _submit(self, tokens: list[int], session: str | None, **options: object) -> None:
        self.count += 1
        name = f"r{self.count}"
        try:
            self.engine.submit(request(name, tokens, session, **options), self.now)  # type: ignore[arg-type]
        except CapacityExhausted:
            assert session is None
            assert self.engine.stats().held_slots == 5
        except QueueFull:
            assert len(self.live) == 5
        except SessionNotFound:
            assert session is not None
            self.sessions.discard(session)
        except SessionBusy:
            assert session is not None
        else:
            self.live[name] = []

    def _take(self, event: Event) -> None:
        seen = self.live[event.request_id]
        if isinstance(event, TokenEvent):
            last = seen[-1]
            assert isinstance(last, Started) or (
                isinstance(last, TokenEvent)
                and (event.seq, event.position) == (last.seq + 1, last.position + 1)
            )
        seen.append(event)
        if isinstance(event, Finished):
            del self.live[event.request_id]
            if event.session is not None:
                self.sessions.add(event.session)


EngineMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
test_engine_machine = EngineMachine.TestCase


class NativeMachine(EngineMachine):
    """On a stand-in for the native runtime, which sees a wrong token, slot or position."""

    def make_runtime(self) -> FakeRuntime | None:
        return FakeRuntime(tiny_tokenizer().vocab_size)


NativeMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
test_engine_machine_on_the_native_runner = NativeMachine.TestCase
