"""The text of a session, and how much of it the state has seen."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from server.engine.sampling import PENALTY_WINDOW
from server.engine.session import Session, StateBlock
from server.engine.text import Detokenizer
from tests.fakes import FakeRuntime
from tests.tiny import request, tiny_engine, tiny_tokenizer

TOKENS = st.lists(st.integers(0, 255), min_size=1, max_size=40)
COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.just("prompt"), TOKENS),
        st.tuples(st.just("hold"), st.integers(0, 255)),
        st.tuples(st.just("feed"), st.integers(1, 60)),
        st.tuples(st.just("draw"), st.integers(0, 255)),
        st.tuples(st.just("cut"), st.integers(0, 60)),
        st.tuples(st.just("copy"), st.none()),
    ),
    max_size=30,
)


def empty() -> Session:
    return Session("s", "me", Detokenizer(tiny_tokenizer()), 0.0, keep=True)


def copy(session: Session) -> Session:
    """By way of its value."""
    return Session.of(session.value(session.state), Detokenizer(tiny_tokenizer()), 0.0)


@dataclass
class Model:
    """The whole text. ``ends`` says of each token where the prompt ends that it is fed with."""

    text: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    position: int = 0

    @property
    def has_pending(self) -> bool:
        return self.position < len(self.text)

    def prompt(self, tokens: list[int]) -> None:
        start = len(self.text) - self.has_pending
        self.text += tokens
        self.ends[start:] = [len(self.text) - 1] * (len(self.text) - 1 - start) + [0]

    def hold(self, token: int) -> None:
        self.text.append(token)
        self.ends.append(0)

    def cut(self, length: int) -> None:
        """What is left of a prompt is fed with no end behind the text."""
        del self.text[length:], self.ends[length:]
        self.ends = [min(end, length - 1) for end in self.ends]
        if self.ends:
            self.ends[-1] = 0

    @property
    def plan(self) -> int:
        """Of what has not been fed; the pending token is fed alone."""
        return max(1, self.ends[self.position] - self.position) if self.has_pending else 1


def do(session: Session, model: Model, command: str, argument: object) -> Session:
    match command, argument:
        case "prompt", list(tokens):
            session.extend(tokens)
            model.prompt(tokens)
        case "hold", int(token):
            session.hold(token)
            model.hold(token)
        case "feed", int(count) if model.has_pending:
            count = min(count, len(model.text) - model.position)
            advance(session, model, count)
        case "draw", int(token):
            advance(session, model, len(model.text) - model.position)
            session.pending = token
            model.hold(token)
        case "cut", int(excess):
            length = max(model.position, len(model.text) - excess)
            session.cut(length)
            model.cut(length)
        case "copy", _:
            session = copy(session)
    return session


def advance(session: Session, model: Model, count: int) -> None:
    tokens = session.next(count)
    assert tokens == model.text[model.position : model.position + count]
    session.advance(tokens)
    model.position += count


@given(COMMANDS)
@example([("prompt", [0, 0, 0]), ("cut", 1)])
def test_session_keeps_its_text_after_any_operations(commands: list[tuple[str, object]]) -> None:
    session, model = empty(), Model()
    for command, argument in commands:
        session = do(session, model, command, argument)
        unseen = len(model.text) - model.position
        assert (session.position, session.length) == (model.position, len(model.text))
        assert session.next(unseen) == model.text[model.position :]
        assert session.pending == (model.text[-1] if model.has_pending else None)
        assert session.num_unfed == max(0, unseen - 1)
        assert list(session.recent) == model.text[: model.position][-PENALTY_WINDOW:]
        assert session.plan == model.plan


@given(COMMANDS)
def test_session_of_its_value_has_the_same_value(commands: list[tuple[str, object]]) -> None:
    session, model = empty(), Model()
    for command, argument in commands:
        session = do(session, model, command, argument)
    session.epoch, session.seq, session.log_index = 3, 17, 40
    session.state = StateBlock(np.arange(8, dtype=np.uint8))
    session.detokenizer.restore(b"\xe2\x80")
    value = session.value(session.state)
    assert copy(session).value(session.state) == value
    assert value.length == session.length


def test_value_of_a_slot_can_not_be_written() -> None:
    block = StateBlock(np.zeros(4, dtype=np.uint8))
    assert block.data.readonly


def test_text_is_not_in_what_a_log_may_show() -> None:
    engine = tiny_engine(runtime=FakeRuntime(tiny_tokenizer().vocab_size))
    engine.submit(request(tokens=[211, 212, 213] * 60, stop=("my secret",)), 0.0)
    for _ in range(3):
        for shown in (*engine._sessions, *engine._requests):
            assert not re.search(r"\b21[123]\b|my secret", repr(shown))
        engine.step(0.0)
