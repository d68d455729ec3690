"""Which of its stop strings an answer ended by: the engine says only that it was one."""

from __future__ import annotations

from collections.abc import Sequence

from model.tokenizer import Tokenizer
from server.engine.types import TokenEvent


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
