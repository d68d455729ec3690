"""Token ids to text that is safe to send: whole characters, never a part of a stop string."""

from __future__ import annotations

import codecs

from model.tokenizer import Tokenizer


class Detokenizer:
    """Incremental UTF-8 over the bytes of tokens. One per session."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._between_characters = True

    def push(self, token_id: int) -> str:
        """The characters that this token completes; bytes that can be none become U+FFFD."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode() if self._between_characters else self._go_on(data)
        except UnicodeDecodeError:
            return self._go_on(data)

    def is_silent(self, token_id: int) -> bool:
        """Whether the token stands for no text."""
        return not self._tokenizer.token_bytes(token_id)

    @property
    def undecoded(self) -> bytes:
        """The bytes of an unfinished character."""
        return self._decoder.getstate()[0]

    def restore(self, undecoded: bytes) -> None:
        """Goes on after ``undecoded``."""
        self._decoder.setstate((undecoded, 0))
        self._between_characters = not undecoded

    def flush(self) -> str:
        """U+FFFD for an unfinished character, if there is one; starts anew."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._between_characters = True
        return text

    def _go_on(self, data: bytes) -> str:
        """Takes into account how the last character began, and how the next one does."""
        text = self._decoder.decode(data)
        self._between_characters = not self._decoder.getstate()[0]
        return text


class StopStrings:
    """Withholds text that may turn out to be the start of a stop string. One per request."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    @property
    def withheld(self) -> str:
        """What may be the start of a stop string."""
        return self._held

    def restore(self, withheld: str) -> None:
        """Goes on after ``withheld``."""
        self._held = withheld

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is safe now, and whether a stop string was met; it and the rest are dropped."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [index for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was withheld, at the end of a request that met no stop string."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
