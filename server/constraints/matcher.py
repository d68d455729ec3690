"""A place in the texts of one grammar, over llguidance: which tokens may come.

With few tokens left it closes: only those may come after which there is room for an
end, so that a text that is cut off is one that parses. All of it depends on the
grammar and the tokens alone, so that a matcher made again continues in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from server.constraints.grammar import Ending, GrammarEndings, Vocabulary, ids_of, words_of
from server.engine.session import UNKNOWN_S
from server.errors import InvalidRequest, RequestError


class FreeText:
    """Answers that may be any text unless they begin with a marker, as a call of a tool does.

    Once a text differs from the marker no grammar holds for it any more: it needs no closing
    when the tokens run out, and is cut like any other text. For one vocabulary and one marker;
    for one thread.
    """

    def __init__(self, vocabulary: Vocabulary, marker: str) -> None:
        self._tokens, self._marker = vocabulary.token_bytes, marker.encode()
        self._num_words = vocabulary.num_words
        #: By what a text has begun with, which is part of the marker.
        self._leaving: dict[bytes, npt.NDArray[np.uint32]] = {}

    def begun(self, before: bytes, token: int) -> bytes:
        """The beginning of the text after ``token``, as far as it has to be known."""
        return (before + self._tokens[token])[: len(self._marker)]

    def is_free(self, begun: bytes) -> bool:
        """Whether a text that begins so cannot become the marker."""
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


#: Of the tokens that may come while a text is being closed, the first few are looked at:
#: the commonest ones, in a vocabulary of merged pairs.
MAX_LOOKED_AT = 256

#: Where no end was found, the next look is that many tokens later.
RETRY_TOKENS = 64

#: Tokens of which a text remembers the end that was found after them, which takes a search.
MAX_FOUND = 32


class NotAllowed(RequestError):
    """A token that the grammar has no place for."""

    code = "internal_error"


class GrammarMatcher:
    """Implements `server.engine.session.Matcher`. For one thread.

    ``free_text`` says where any text may come, which is not closed.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        endings: GrammarEndings,
        place: LLMatcher,
        ending: Ending | None,
        jump: int,
        num_tokens: int = 0,
        free_text: FreeText | None = None,
        begun: bytes = b"",
        found: Mapping[int, Ending] | None = None,
    ) -> None:
        self._vocabulary, self._endings = vocabulary, endings
        self._place, self._ending = place, ending
        self._jump, self._num_tokens = jump, num_tokens
        self._free_text, self._begun = free_text, begun
        self._found = dict(found or {})  # the last end after each token
        #: Seconds that the last token took: its mask, and to continue by it.
        self.cost_s = UNKNOWN_S

    def allowed(self, budget: int | None = None) -> npt.NDArray[np.uint32]:
        """See `_mask`; measured."""
        begin_s = time.perf_counter()
        mask = self._mask(budget)
        self.cost_s = time.perf_counter() - begin_s
        return mask

    def accept(self, token: int) -> None:
        """Continues by ``token``. Raises `NotAllowed`, and is of no more use then."""
        begin_s = time.perf_counter()
        self._advance(token)
        self.cost_s += time.perf_counter() - begin_s

    def _mask(self, budget: int | None) -> npt.NDArray[np.uint32]:
        """Bit ``i % 32`` of word ``i // 32``: token ``i`` may come, and ``budget`` tokens in all.

        Raises `InvalidRequest` where the grammar has become too much work.
        """
        self._check()
        mask = words_of(self._place.compute_bitmask(), self._vocabulary.num_words).copy()
        self._check()
        ending = self._ending
        if budget is None or self._is_free or not ending or len(ending) + self._jump < budget:
            return mask
        closing = self._closing(mask, ending, budget)
        if self._free_text is not None:
            closing |= mask & self._free_text.leaving(self._begun)
        return closing

    def _advance(self, token: int) -> None:
        self._check()
        if not self._place.consume_token(token):
            if "doesn't satisfy" in self._place.get_error():
                raise NotAllowed(f"token {token} is not allowed by the grammar")
            self._check()
        self._num_tokens += 1
        if self._free_text is not None:
            self._begun = self._free_text.begun(self._begun, token)
        if token == self._vocabulary.eos_token_id:
            self._ending = ()
        elif self._is_free:
            self._ending = None
        elif self._ending is not None or self._num_tokens % RETRY_TOKENS == 0:
            before = self._ending or ()
            self._ending = self._ending_after(token, before)
            if self._ending is not None:
                self._jump = max(self._jump, len(self._ending) - len(before))

    def _ending_after(self, token: int, before: Ending) -> Ending | None:
        """Found without a search where it is that which followed ``token`` the last time.

        In a list each record ends with the same token, and from there on the end is the same.
        """
        found = self._found.get(token, ())
        if len(found) > len(before) + self._jump:
            found = ()
        ending = self._endings.after(token, before, self._place, found)
        if ending is not None and len(ending) > len(before):
            if len(self._found) == MAX_FOUND:
                self._found.clear()
            self._found[token] = ending
        return ending

    def is_over(self) -> bool:
        """Whether nothing but the end may follow."""
        return self._place.is_stopped() and not self._place.is_error()

    def copy(self) -> GrammarMatcher:
        """Another one at this place, that continues by itself."""
        other = GrammarMatcher(
            self._vocabulary,
            self._endings,
            self._place.deep_copy(),
            self._ending,
            self._jump,
            self._num_tokens,
            self._free_text,
            self._begun,
            self._found,
        )
        other.cost_s = self.cost_s
        return other

    @property
    def _is_free(self) -> bool:
        return self._free_text is not None and self._free_text.is_free(self._begun)

    def _closing(
        self, mask: npt.NDArray[np.uint32], ending: Ending, budget: int
    ) -> npt.NDArray[np.uint32]:
        """The tokens of ``mask`` that leave room for an end; that of ``ending`` is always one."""
        kept = [ending[0]]
        if len(ending) < budget:
            some = ids_of(mask)[:MAX_LOOKED_AT]
            kept += self._endings.keeping(ending, self._place, map(int, some))
        narrow = np.zeros_like(mask)
        for token in kept:
            narrow[token // 32] |= np.uint32(1 << token % 32)
        return narrow

    def _check(self) -> None:
        if self._place.is_error():
            raise InvalidRequest(
                "response_format: the grammar became too much work in this text",
                "response_format",
            )
