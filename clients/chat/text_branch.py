"""A branch of plain text: a session on the server, which the model continues."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from clients.chat.branch import Asked, Piece, Turn
from clients.python import Client, Generation, Session, SessionNotFound


class TextAnswer:
    """A continuation of the text. See `clients.chat.branch.Answer`."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    @property
    def num_tokens(self) -> int:
        finished = self._generation.finished
        return 0 if finished is None else finished.usage.completion_tokens

    @property
    def position(self) -> int:
        finished = self._generation.finished
        assert finished is not None
        return finished.position

    def __enter__(self) -> Self:
        self._generation.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        self._generation.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[Piece]:
        for event in self._generation:
            yield Piece(event.text)


@dataclass
class TextBranch:
    """A session on the server and the turns of its text. See `clients.chat.branch.Branch`."""

    client: Client
    model: str
    session: Session
    turns: list[Turn] = field(default_factory=list)

    @property
    def position(self) -> int:
        return self.turns[-1].ends if self.turns else 0

    def answer(self, asked: Asked, may_be_known: bool = False) -> TextAnswer:
        generation = self.session.generate(
            asked.prompt, idempotency_key=asked.key, **asked.sampling
        )
        return TextAnswer(generation)

    def rewind(self, num_turns: int) -> None:
        if num_turns < len(self.turns):
            self.session.rewind(self.turns[num_turns].begins)
            del self.turns[num_turns:]

    def fork(self, num_turns: int | None = None) -> TextBranch:
        turns: Sequence[Turn] = self.turns[:num_turns]
        at = None if len(turns) == len(self.turns) else self.turns[len(turns)].begins
        (session,) = self.session.fork(at=at)
        return TextBranch(self.client, self.model, session, list(turns))

    def reread(self, num_turns: int | None) -> TextBranch:
        branch = TextBranch(self.client, self.model, self.client.create_session(self.model))
        for turn in self.turns[:num_turns]:
            begins = branch.position
            text = turn.prompt + turn.answer
            ends = branch.session.append(text).position if text else begins
            branch.turns.append(replace(turn, begins=begins, ends=ends))
        return branch

    def delete(self) -> None:
        with contextlib.suppress(SessionNotFound):  # it has expired
            self.session.delete()
