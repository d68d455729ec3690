"""Token ids to text that is safe to send: whole characters, never a part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from model.tokenizer import Tokenizer

#: Bytes of the longest part of a character that is not whole, and tokens among which it is
#: looked for.
_MAX_PART_BYTES, _MAX_PART_TOKENS = 3, 64


class Detokenizer:
    """Incremental UTF-8 over the bytes of tokens. One per session.

    The first token of a text may have other bytes (`Tokenizer.first_bytes`): so long as none has
    come, the detokeniser is at the ``start``.
    """

    def __init__(self, tokenizer: Tokenizer, start: bool = True) -> None:
        self._tokenizer, self._at_start = tokenizer, start
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._between_characters = True

    def push(self, token_id: int, exact: bool = False) -> str:
        """The characters that this token completes; bytes that can be none become U+FFFD.

        ``exact``: it is shown with all its bytes also as the first one of a text.
        """
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            data = data if exact else self._tokenizer.first_bytes(token_id)
        try:
            return data.decode() if self._between_characters else self._decode(data)
        except UnicodeDecodeError:
            return self._decode(data)

    def push_all(self, token_ids: Sequence[int]) -> str:
        """What `push` gives for all of them: decoded at once, in a tenth of the time."""
        texts, num = list[str](), 0
        while self._at_start and num < len(token_ids):
            texts.append(self.push(token_ids[num]))
            num += 1
        rest = b"".join(map(self._tokenizer.token_bytes, token_ids[num:]))
        return "".join([*texts, self._decode(rest)])

    def skip(self, token_ids: Iterable[int]) -> None:
        """Continues behind tokens whose text is not asked for."""
        self._at_start = self._at_start and self._tokenizer.silent_ids.issuperset(token_ids)

    def is_silent(self, token_id: int) -> bool:
        """Whether the token stands for no text."""
        return token_id in self._tokenizer.silent_ids

    @property
    def undecoded(self) -> bytes:
        """The bytes of an unfinished character."""
        return self._decoder.getstate()[0]

    def restore(self, undecoded: bytes, start: bool = False) -> None:
        """Continues after ``undecoded``, at the ``start`` of a text or within it."""
        self._at_start = start
        self._decoder.setstate((undecoded, 0))
        self._between_characters = not undecoded

    def flush(self) -> str:
        """U+FFFD for an unfinished character, if there is one; starts again."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._between_characters = True
        return text

    def _decode(self, data: bytes) -> str:
        """Takes into account how the last character began, and how the next one does."""
        text = self._decoder.decode(data)
        self._between_characters = not self._decoder.getstate()[0]
        return text


def text_within(
    tokenizer: Tokenizer, token_ids: Sequence[int], start: int, end: int, at_start: bool
) -> str:
    """The text of the tokens from ``start`` to ``end``: the characters that these complete.

    ``at_start``: the first of ``token_ids`` begins a text.
    """
    before = start
    num_bytes = 0
    while before and num_bytes < _MAX_PART_BYTES and start - before < _MAX_PART_TOKENS:
        before -= 1
        num_bytes += len(tokenizer.token_bytes(token_ids[before]))
    detokenizer = Detokenizer(tokenizer, at_start)
    detokenizer.skip(token_ids[:before])
    detokenizer.push_all(token_ids[before:start])
    return detokenizer.push_all(token_ids[start:end])


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
        """Continues after ``withheld``."""
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
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was withheld, at the end of a request that met no stop string."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
