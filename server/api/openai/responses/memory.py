"""Responses that are not stored and can be gone on from, for a while, on their own socket."""

from __future__ import annotations

from collections import OrderedDict

from server.api.openai.responses.note import Json, Note
from server.api.openai.responses.turns import ResponseTurn

#: Responses of one socket.
MAX_REMEMBERED = 16


class Remembered:
    """The last whole conversations, in at most ``max_bytes``; the oldest ones are forgotten."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._packed: OrderedDict[str, str] = OrderedDict()  # parsed, one takes many times that

    def keep(self, note: Note) -> None:
        """``note`` has all items up to the end of its response."""
        self._packed[note.id] = note.packed()
        sizes = list(map(len, self._packed.values()))
        while len(sizes) > MAX_REMEMBERED or sum(sizes) > self._max_bytes:
            self._packed.popitem(last=False)
            del sizes[0]

    def find(self, id: str) -> ResponseTurn | None:
        """The turn called ``id``."""
        packed = self._packed.get(id)
        return None if packed is None else ResponseTurn(Note.unpacked(packed), _nothing)


async def _nothing() -> list[Json]:
    return []
