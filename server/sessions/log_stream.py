"""A session's log as a stream that is only read: its items, and chunks from one offset to another.

An offset is the number of a log's entry, which a rewind does not change: the entries of the text
that was cut off stay in the log, and the rewind itself is one more of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from model.tokenizer import Tokenizer
from server.engine.detokenizer import Detokenizer
from server.engine.types import Finished, TokenEvent
from server.engine.value import Accepted, Entry, Rewound
from server.errors import invalid
from server.sessions.sessions import MAX_SEQ, Sessions
from server.store.heads import num_tokens

#: About so many tokens are in one chunk.
CHUNK_TOKENS = 16_384

_OFFSET = re.compile("[0-9]{16}")


@dataclass(frozen=True, slots=True)
class FedItem:
    """A request begins: what it gives the session to read; perhaps it generates after that.

    The session has had ``seq`` events and ``position`` tokens before it.
    """

    request_id: str
    seq: int
    position: int
    num_tokens: int
    text: str
    generates: bool


@dataclass(frozen=True, slots=True)
class RewoundItem:
    """The text was cut back to ``position`` tokens by a rewind, in a new ``epoch``."""

    epoch: int
    seq: int
    position: int


Item = FedItem | TokenEvent | Finished | RewoundItem


def offset_of(place: int) -> str:
    """The offset in front of entry number ``place``: texts that sort as the numbers do."""
    return f"{place:016}"


def place_of(offset: str, name: str = "offset") -> int:
    """The number of `offset_of`. Raises `InvalidRequest` that names the parameter."""
    if not _OFFSET.fullmatch(offset):
        raise invalid(name, "must be -1, now, or an offset that this server has sent")
    return int(offset)


def ends_turn(item: Entry | Item) -> bool:
    """Whether the session has generated what a request asked for, or has failed to."""
    return isinstance(item, Finished) and item.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Chunk:
    """The messages of the entries from ``start`` to ``end``.

    There are no more at present if it ``is_last``, and there will be none if it ``is_closed``.
    """

    start: int
    end: int
    messages: tuple[bytes, ...]
    is_last: bool
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class LogStream:
    """Reads a session of ``owner`` out of the store, wherever the session itself is.

    ``write`` makes the messages of an item. With a ``turn`` the stream has only what the
    session generates next from that place on, and is closed by the end of that. Methods raise
    what `server.sessions.questions.read_log` raises.
    """

    sessions: Sessions
    session: str
    owner: str
    tokenizer: Tokenizer
    write: Callable[[Item], list[bytes]]
    turn: int | None = None

    async def chunk(self, start: int | None) -> Chunk:
        """The next messages from ``start`` on, or from the oldest; none only at the end."""
        place = start
        if self.turn is not None:
            start = max(start or 0, self.turn)
            place = max(start - 1, self.turn)  # what is before ``start`` may have been the end
        found: list[bytes] = []
        size = 0
        while True:
            page = await self.sessions.log(self.session, self.owner, place)
            start = page.start if start is None else start
            if start > page.end:
                name = "turn" if start == self.turn else "offset"
                raise invalid(name, "is beyond the end of the stream")
            place = page.start
            for number, entry in page.entries:
                place = number + 1
                if number >= start:
                    found += self._messages(entry)
                    size += num_tokens(entry)
                if self.turn is not None and ends_turn(entry):
                    return Chunk(start, place, tuple(found), is_last=True, is_closed=True)
                if size >= CHUNK_TOKENS:
                    break
            is_last = place >= page.end
            if found or is_last:
                return Chunk(start, place, tuple(found), is_last)

    async def tail(self) -> Chunk:
        """The end of the stream as it is now, without any message."""
        if self.turn is None:
            end = (await self.sessions.log(self.session, self.owner, MAX_SEQ)).end
            return Chunk(end, end, (), is_last=True)
        chunk = await self.chunk(self.turn)
        while not chunk.is_last:
            chunk = await self.chunk(chunk.end)
        return replace(chunk, start=chunk.end, messages=())

    def _messages(self, entry: Entry) -> list[bytes]:
        if isinstance(entry, TokenEvent | Finished):
            return self.write(entry)
        if isinstance(entry, Rewound):
            value = entry.value
            return self.write(RewoundItem(value.epoch, value.seq, value.length))
        if not isinstance(entry, Accepted):
            return []
        detokenizer, request = Detokenizer(self.tokenizer, start=entry.length == 0), entry.request
        text = "".join(map(detokenizer.push, entry.tokens))
        num, generates = len(entry.tokens), request.sampling is not None
        return self.write(
            FedItem(request.request_id, entry.seq, entry.length, num, text, generates)
        )
