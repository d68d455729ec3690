"""Answers that may be any text unless they begin with a marker, as a call of a tool does.

Once a text differs from the marker no grammar holds for it any more: it needs no closing
when the tokens run out, and is cut like any other text.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from server.constraints.vocabulary import Vocabulary


class FreeText:
    """For one vocabulary and one marker; for one thread."""

    def __init__(self, vocabulary: Vocabulary, marker: str) -> None:
        self._tokens, self._marker = vocabulary.token_bytes, marker.encode()
        self._num_words = vocabulary.num_words
        #: By what a text has begun with, which is part of the marker.
        self._leaving: dict[bytes, npt.NDArray[np.uint32]] = {}

    def begun(self, before: bytes, token: int) -> bytes:
        """The beginning of the text after ``token``, as far as it has to be known."""
        return (before + self._tokens[token])[: len(self._marker)]

    def is_free(self, begun: bytes) -> bool:
        """Whether a text that begins so is no marker, whatever follows."""
        return not self._marker.startswith(begun)

    def leaving(self, begun: bytes) -> npt.NDArray[np.uint32]:
        """The tokens after which the text is free: bit ``i % 32`` of word ``i // 32``.

        Looked for once: to go through a large vocabulary takes some tens of milliseconds.
        """
        found = self._leaving.get(begun)
        if found is None:
            found = self._leaving[begun] = self._found(begun)
        return found

    def _found(self, begun: bytes) -> npt.NDArray[np.uint32]:
        bits = np.zeros(self._num_words * 32, bool)
        bits[: len(self._tokens)] = [
            bool(text) and self.is_free((begun + text)[: len(self._marker)])
            for text in self._tokens
        ]
        words = np.packbits(bits, bitorder="little").view(np.uint32)
        words.setflags(write=False)
        return words
