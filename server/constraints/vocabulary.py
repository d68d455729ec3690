"""A model's tokens as llguidance wants them, and how much work it may do for one mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

# What a client's grammar may cost: a mask takes at most some tens of milliseconds, and a
# matcher some megabytes (docs/use/structured-output.md has what was measured).
LIMITS = LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=5_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)

# llguidance wants a name for a special token, which must not be the bytes of any text.
_SPECIAL = b"<|special %d|>"

#: No letter of UTF-8 has this byte; llguidance marks special tokens with it.
_MARK = 0xFF


class Vocabulary:
    """The tokens of one model. Immutable, so that threads share it.

    ``token_bytes`` has the bytes of every id, b"" for the special ones. ``encode``
    gives the ids of a text as the model is used to them, where a grammar leaves
    no choice about the text, with exactly its bytes; without it they are the longest that fit.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        eos_token_id: int,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.token_bytes = tuple(token_bytes)
        self.eos_token_id = eos_token_id
        self.num_words = (len(self.token_bytes) + 31) // 32
        tokens = _Tokens(self.token_bytes, eos_token_id, encode or self.longest)
        self._ids = {text: id for id, text in reversed(list(enumerate(self.token_bytes))) if text}
        self._max_bytes = max(map(len, self.token_bytes))
        self.backend = LLTokenizer(
            TokenizerWrapper(tokens), n_vocab=len(self.token_bytes), eos_token=eos_token_id
        )
        for id, text in enumerate(self.token_bytes):
            if text and _MARK not in text:
                seen = self.backend.decode_bytes([id])
                assert seen == text, f"token {id} is {text!r} and is read as {seen!r}"

    def matcher(self, grammar: str) -> LLMatcher:
        """At the beginning of ``grammar``; look at ``is_error`` first."""
        return LLMatcher(self.backend, grammar, log_level=0, limits=LIMITS)

    def longest(self, text: str) -> list[int]:
        """The longest tokens that fit ``text``. Raises `ValueError` where some of it is in none."""
        ids: list[int] = []
        data, start = text.encode(), 0
        while start < len(data):
            length = min(self._max_bytes, len(data) - start)
            while data[start : start + length] not in self._ids:
                length -= 1
                if not length:
                    raise ValueError(f"no token begins {data[start:]!r}")
            ids.append(self._ids[data[start : start + length]])
            start += length
        return ids


class _Tokens:
    """What `TokenizerWrapper` asks of a tokenizer."""

    bos_token_id = None

    def __init__(
        self, token_bytes: Sequence[bytes], eos_token_id: int, encode: Callable[[str], list[int]]
    ) -> None:
        self.eos_token_id = eos_token_id
        self.special_token_ids = [id for id, text in enumerate(token_bytes) if not text]
        self.tokens = [text or _SPECIAL % id for id, text in enumerate(token_bytes)]
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):  # so says the wrapper's first look
            raise TypeError("takes text")
        return self._encode(text)
