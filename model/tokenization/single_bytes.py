"""The vocabulary of the 256 bytes: an id is its byte, as models have it that read bytes.

Id 0 ends a text, so that a text cannot have the byte 0: it is encoded as a space.
"""

from __future__ import annotations

from typing import Self

from tokenizers import AddedToken

from model.tokenization.base import END_OF_TEXT

NUM_IDS, EOS = 256, 0
#: The bytes of each id but `EOS`.
TOKENS = {id: bytes([id]) for id in range(NUM_IDS) if id != EOS}


class BytesCodec:
    """See `model.tokenization.base.Codec`."""

    kind = "bytes"
    puts_space_in_front = False
    first_bytes: dict[int, bytes] = {}  # noqa: RUF012 - nothing is put in front of a text
    aliases: dict[str, int] = {}  # noqa: RUF012 - never changed
    eos_token_ids = (EOS,)
    special = {EOS: AddedToken(END_OF_TEXT, special=True)}  # noqa: RUF012 - never changed
    token_bytes = (b"", *TOKENS.values())

    def encode(self, text: str) -> list[int]:
        """Its bytes."""
        return list(text.encode().replace(b"\0", b" "))

    encode_after_special = encode_continuation = encode_exact = encode

    def remembering(self) -> Self:
        """The same: there is nothing to remember."""
        return self

    def content(self) -> str:
        """In the format of RWKV's vocabularies, of which the end of text has no line."""
        return "".join(f"{id} {token!r} 1\n" for id, token in TOKENS.items())
