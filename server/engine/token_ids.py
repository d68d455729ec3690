"""The ids of a text as it is held in memory: four bytes each, where a Python integer has 28."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Self, overload

import numpy as np
import numpy.typing as npt

from server.errors import InvalidRequest


class TokenArray(Sequence[int]):
    """Token ids that never change; equal to any sequence of the same.

    Raises `OverflowError` for an id below 0 or beyond 32 bits.
    """

    __slots__ = ("_ids",)
    __hash__ = None  # type: ignore[assignment]  # a tuple that it is equal to has another hash

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids = array("I", ids)

    @classmethod
    def of(cls, ids: Sequence[int]) -> Self:
        """``ids``, copied unless they are one already."""
        return ids if isinstance(ids, cls) else cls(ids)

    @classmethod
    def joined(cls, first: Sequence[int], then: Sequence[int]) -> Self:
        """Both, one after the other; ``then`` itself where there is no ``first``."""
        if not first:
            return cls.of(then)
        found = cls(first)
        found._ids += cls.of(then)._ids
        return found

    @property
    def numbers(self) -> npt.NDArray[np.uint32]:
        """The same memory, for reading."""
        return np.frombuffer(self._ids, np.uint32)

    def copied(self) -> array[int]:
        """An array of the caller's own."""
        return self._ids[:]

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> TokenArray: ...
    def __getitem__(self, place: int | slice) -> int | TokenArray:
        if isinstance(place, slice):
            return TokenArray(self._ids[place])
        return self._ids[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenArray):
            return self._ids == other._ids
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(map(int.__eq__, self._ids, other))

    def __repr__(self) -> str:
        return f"<{len(self)} token ids>"  # a text is not for a log


def check_tokens(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises `InvalidRequest` for an id that the model does not have."""
    try:  # a third of the time of min() and max()
        highest = TokenArray.of(tokens).numbers.max(initial=0)
    except OverflowError:  # below 0, or far beyond
        highest = vocab_size
    if highest >= vocab_size:
        raise InvalidRequest(f"{param}: token ids must be in 0..{vocab_size - 1}", param)
