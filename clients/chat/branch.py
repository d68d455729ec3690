"""The turns of a conversation and their positions; a branch can be rewound to any turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from clients.python import Client, Session


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and its answer.

    The session had ``begins`` tokens before the turn and has ``ends`` after it.
    """

    prompt: str
    answer: str
    begins: int
    ends: int


@dataclass
class Branch:
    """A session on the server and the turns of its text."""

    session: Session
    turns: list[Turn] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Number of tokens of the text, up to the end of the last turn."""
        return self.turns[-1].ends if self.turns else 0

    def rewind(self, num_turns: int) -> None:
        """Rewinds the session to its first ``num_turns`` turns."""
        if num_turns < len(self.turns):
            self.session.rewind(self.turns[num_turns].begins)
            del self.turns[num_turns:]

    def fork(self, num_turns: int | None = None) -> Branch:
        """A copy of the branch, or of its first ``num_turns`` turns."""
        turns: Sequence[Turn] = self.turns[:num_turns]
        at = None if len(turns) == len(self.turns) else self.turns[len(turns)].begins
        (session,) = self.session.fork(at=at)
        return Branch(session, list(turns))


def reread(client: Client, turns: Sequence[Turn], model: str) -> Branch:
    """A new session of ``model`` that reads the text of ``turns`` again."""
    branch = Branch(client.create_session(model))
    for turn in turns:
        begins = branch.position
        text = turn.prompt + turn.answer
        ends = branch.session.append(text).position if text else begins
        branch.turns.append(replace(turn, begins=begins, ends=ends))
    return branch
