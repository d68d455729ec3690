"""An answer as it comes: thinking, text, calls, and which stop string ended it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import StringIO
from typing import Any

from pydantic_core import from_json

from model.chat import CallForm
from model.tokenizer import Tokenizer
from server.api.chat.calls import Arguments, CallBegins, CallReader, Piece, Text
from server.engine.types import Finished, Started, TokenEvent


@dataclass(frozen=True, slots=True)
class Thought:
    """More of what the model thinks before its answer."""

    text: str


AnswerPiece = Thought | Piece


class AnswerReader:
    """Reads one answer, which may be calls in the form ``calls``."""

    def __init__(self, calls: CallForm | None) -> None:
        self._reader = CallReader(calls) if calls else None
        #: What names the calls of a kept session, which are the same when they are read again.
        self._place = ""

    def start(self, event: Started) -> None:
        """Takes in the first event of a session that is kept."""
        self._place = f"{event.session}:{event.seq}"

    def read(self, event: TokenEvent) -> list[AnswerPiece]:
        """What a token adds."""
        thought: list[AnswerPiece] = [Thought(event.thought)] if event.thought else []
        return thought + self._push(event.text)

    def finish(self, end: Finished) -> list[AnswerPiece]:
        """What the last event adds, and what was held back."""
        pieces: list[AnswerPiece] = [Thought(end.thought)] if end.thought else []
        pieces += self._push(end.text)
        return pieces if self._reader is None else [*pieces, *self._reader.end(end.grammar_ended)]

    def _push(self, text: str) -> list[AnswerPiece]:
        if self._reader is None:
            return [Text(text)] if text else []
        return [*self._reader.push(text)]

    def new_call_id(self, index: int) -> str:
        """24 characters that name the ``index``-th call; to be asked once for each call."""
        named = f"{self._place}:{index}".encode()
        return sha256(named).hexdigest()[:24] if self._place else secrets.token_hex(12)

    @property
    def has_called(self) -> bool:
        """Whether the answer is calls, the last one complete: what was cut does not count."""
        return self._reader is not None and self._reader.is_complete


@dataclass(slots=True)
class WholeCall:
    """A call in an answer; ``arguments`` is JSON."""

    id: str
    name: str
    arguments: StringIO

    @property
    def given(self) -> dict[str, Any]:
        """The arguments as an object; of a call that was cut, what there is of them."""
        try:
            found = from_json(self.arguments.getvalue() or "{}", allow_partial="trailing-strings")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


class WholeAnswer:
    """Keeps the pieces of one answer that is not streamed."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._text, self._thoughts = StringIO(), StringIO()
        self.calls: list[WholeCall] = []

    def add(self, pieces: list[AnswerPiece]) -> None:
        """Adds what the reader has returned."""
        for piece in pieces:
            if isinstance(piece, Thought):
                self._thoughts.write(piece.text)
            elif isinstance(piece, Text):
                self._text.write(piece.text)
            elif isinstance(piece, CallBegins):
                id = self._reader.new_call_id(piece.index)
                self.calls.append(WholeCall(id, piece.name, StringIO()))
            else:
                assert isinstance(piece, Arguments), piece
                self.calls[piece.index].arguments.write(piece.text)

    def take(self) -> tuple[str, str]:
        """The text and the thoughts since this was last asked."""
        taken = self.text, self.thoughts
        if any(taken):
            self._text, self._thoughts = StringIO(), StringIO()
        return taken

    @property
    def text(self) -> str:
        return self._text.getvalue()

    @property
    def thoughts(self) -> str:
        return self._thoughts.getvalue()


class StopFinder:
    """Reads the tokens of an answer, those that are never shown as well.

    ``stops`` are the client's: what else ends an answer, such as the model's own marks, is none.
    """

    def __init__(self, stops: Sequence[str], tokenizer: Tokenizer) -> None:
        self._stops = [stop.encode() for stop in stops]
        self._tokenizer = tokenizer
        self._max_bytes = 2 * max(map(len, self._stops), default=0)
        self._before, self._last = b"", b""

    def add(self, event: TokenEvent) -> None:
        """Takes in the next token."""
        if self._stops:
            self._before = (self._before + self._last)[-self._max_bytes :]
            self._last = self._tokenizer.token_bytes(event.token_id)

    def found(self) -> str | None:
        """The stop string that the last token has completed, the first one in the text."""
        text = self._before + self._last
        places = [(text.find(stop, self._first(stop)), stop) for stop in self._stops]
        found = [each for each in places if each[0] >= 0]
        return min(found)[1].decode() if found else None

    def _first(self, stop: bytes) -> int:
        """Where a ``stop`` may begin that ends in the last token."""
        return max(0, len(self._before) - len(stop) + 1)
