"""The state after a prompt's beginning, its key, and the handle by which a client names it.

An owner never meets what another one left: the owner is part of every key. So is what the text
begins with, a named state or another prompt's state.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple, Self

import numpy as np

from server.engine.token_ids import TokenArray
from server.engine.value import Origin, SessionValue, StateBlock, UnfedSegment
from server.errors import RequestError, invalid

#: What a handle begins with, for those who find one in a log.
MARK = "prefix_"
#: Of a handle. The state of a prompt is kept at most so near to its end that this is enough.
MAX_HANDLE_CHARS = 1024
_KEY_BYTES = 32


class PrefixNotFound(RequestError):
    """No such prefix, not this owner's, or one that has made room: these look alike on purpose."""

    code = "prefix_not_found"
    message = (
        "prefix: the server does not have it, or has it no more; "
        "send the whole prompt, with return_prefix for a new handle"
    )
    param = "prefix"


class Prefix(NamedTuple):
    """The state ``block`` after the first ``num_tokens`` of a prompt, which ``key`` stands for.

    It has seen ``position`` tokens of the text, ``recent`` last, which penalties look at.
    """

    key: bytes
    num_tokens: int
    block: StateBlock
    position: int
    recent: tuple[int, ...]


class Evicted(NamedTuple):
    """A prefix of ``owner`` that made room.

    Or, ``kept``, one that is new and still here, for those who share what they have.
    """

    owner: str
    prefix: Prefix
    kept: bool = False


class PrefixHandle(NamedTuple):
    """A prompt that was read: the ``key`` of a state, and the tokens that it has not seen."""

    key: bytes
    unfed: Sequence[int]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `InvalidRequest` for what no server has given out."""
        try:
            if not text.startswith(MARK):
                raise ValueError
            data = urlsafe_b64decode(text.removeprefix(MARK))
            unfed = np.frombuffer(data[_KEY_BYTES:], "<u4").tolist()
            handle = cls(data[:_KEY_BYTES], tuple(unfed))
        except ValueError:  # not base64, or not whole numbers
            raise invalid("prefix", "is not a handle that return_prefix has given") from None
        if not unfed or str(handle) != text:
            raise invalid("prefix", "is not a handle that return_prefix has given")
        return handle

    def __str__(self) -> str:
        """What a client has: a word for the body of a request, and for a line of a file."""
        data = self.key + np.array(self.unfed, "<u4").tobytes()
        return MARK + urlsafe_b64encode(data).decode()

    def start(self, prefix: Prefix) -> SessionValue:
        """What a session begins with that has read the whole prompt, ``prefix`` being its state."""
        *unfed, pending = self.unfed
        return SessionValue(
            id="",
            owner="",
            position=prefix.position,
            unfed=(UnfedSegment(tuple(unfed), len(unfed)),) if unfed else (),
            pending=pending,
            recent=prefix.recent,
            state=prefix.block,
            origin=Origin(self.key.hex(), prefix.position + len(self.unfed)),
        )


def keys(
    owner: str, tokens: Sequence[int], lengths: Iterable[int], origin: str = ""
) -> Iterator[bytes]:
    """The key of each prefix of ``tokens``, for ascending ``lengths``, in one pass of hashing.

    ``origin`` is the digest of what the tokens come after: the same text after another state has
    another key. blake2b, 32 bytes, over the owner's own digest and that of a given origin, which
    have a fixed length, and the tokens as little-endian int32. No length is above that of
    ``tokens``.
    """
    digest = blake2b(blake2b(owner.encode()).digest(), digest_size=_KEY_BYTES)
    if origin:  # no tokens take its place: it is hashed under a name of its own
        digest = blake2b(digest.digest(), digest_size=_KEY_BYTES, person=b"named state")
        digest.update(blake2b(origin.encode()).digest())
    data = TokenArray.of(tokens).numbers.astype("<u4", copy=False).data
    start = 0
    for length in lengths:
        assert start <= length <= len(data), (start, length, len(data))
        digest.update(data[start:length])
        start = length
        yield digest.digest()
