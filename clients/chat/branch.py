"""The turns of a conversation; a branch can be rewound to any turn and copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from clients.python.protocol import Sampling


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and its answer, with what the model thought before it.

    The text had ``begins`` tokens before the turn and has ``ends`` after it.
    """

    prompt: str
    answer: str
    begins: int
    ends: int
    thought: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt that has no answer yet. The server answers it once under its ``key``."""

    prompt: str
    sampling: Sampling
    key: str


class Piece(NamedTuple):
    """More of an answer, or of the thinking before it, or a ``notice`` about the connection.

    ``restarts``: the server has lost the answer, which comes again from its beginning.
    """

    text: str = ""
    thought: str = ""
    notice: str = ""
    restarts: bool = False


class Answer(Protocol):
    """An answer while it is generated. Leaving its ``with`` block cancels it.

    ``num_tokens`` were generated; then the text has ``position`` tokens.
    """

    @property
    def num_tokens(self) -> int: ...
    @property
    def position(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...
    def __iter__(self) -> Iterator[Piece]: ...


class Branch(Protocol):
    """One line of a conversation."""

    turns: list[Turn]

    @property
    def position(self) -> int:
        """Number of tokens of the text, up to the end of the last turn."""

    def answer(self, asked: Asked, may_be_known: bool = False) -> Answer:
        """Generates an answer; the caller adds the turn.

        ``may_be_known``: an earlier process may have asked for it; it then comes as a whole.
        """

    def rewind(self, num_turns: int) -> None:
        """Goes back to its first ``num_turns`` turns. Raises `HistoryGone`."""

    def fork(self, num_turns: int | None = None) -> Branch:
        """A copy of the branch, or of its first ``num_turns`` turns. Raises `HistoryGone`."""

    def reread(self, num_turns: int | None) -> Branch:
        """The same as `fork`, where the server has to read the text again."""

    def delete(self) -> None:
        """Frees what the server keeps of it."""
