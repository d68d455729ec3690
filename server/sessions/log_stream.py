"""A session's log as a stream that is only read: its items, and chunks from one offset to another.

An offset is the number of a log's entry, which a rewind does not change: the entries of the text
that was cut off stay in the log, and the rewind itself is one more of them. A long prompt is one
entry and many chunks: an offset within it is also a number of its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from model.tokenizer import Tokenizer
from server.engine.detokenizer import text_within
from server.engine.types import Finished, TokenEvent
from server.engine.value import Accepted, Entry, Rewound
from server.errors import invalid
from server.runtime.followers import Follower
from server.sessions.questions import LogPage
from server.sessions.sessions import MAX_SEQ, Sessions
from server.store.heads import num_tokens

#: Of an offset or a turn.
BEYOND = "is beyond the end of the stream"
#: About so many tokens are in one chunk, and at most so many of a prompt in one item.
CHUNK_TOKENS = 16_384
#: How often what other replicas write is looked for.
ELSEWHERE_S = 1.0

_OFFSET = re.compile("([0-9]{16})(?:-([0-9]{10}))?")


class Place(NamedTuple):
    """In front of token number ``token`` of a log's entry ``number``."""

    number: int
    token: int = 0


@dataclass(frozen=True, slots=True)
class FedItem:
    """What a request gives the session to read, or a part of it; perhaps it generates after that.

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


class ItemWriter(Protocol):
    """Makes messages of items. Those of one ``format`` write the same of a session's item."""

    @property
    def format(self) -> str: ...
    @property
    def shows_input(self) -> bool:
        """Whether a message has the text of a `FedItem`: without need it is not decoded."""

    def of(self, item: Item, /) -> list[bytes]: ...


def offset_of(place: Place) -> str:
    """The offset in front of ``place``: texts that sort as the places do."""
    within = f"-{place.token:010}" if place.token else ""
    return f"{place.number:016}{within}"


def place_of(offset: str, name: str = "offset") -> Place:
    """The place of `offset_of`. Raises `InvalidRequest` that names the parameter."""
    found = _OFFSET.fullmatch(offset)
    place = Place(0) if found is None else Place(int(found[1]), int(found[2] or 0))
    if found is None or place.token % CHUNK_TOKENS:
        raise invalid(name, "must be -1, now, or an offset that this server has sent")
    return place


def ends_turn(item: Entry | Item) -> bool:
    """Whether the session has generated what a request asked for, or has failed to."""
    return isinstance(item, Finished) and item.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Chunk:
    """The messages from ``start`` to ``end``.

    There are no more at present if it ``is_last``, and there will be none if it ``is_closed``.
    """

    start: Place
    end: Place
    messages: tuple[bytes, ...]
    is_last: bool
    is_closed: bool = False


class WrittenPage(NamedTuple):
    """A part of the log, and the messages that were ``written`` of it, by format and place."""

    log: LogPage
    written: dict[tuple[str, Place], list[bytes]]


@dataclass(frozen=True, slots=True)
class LogStream:
    """Reads a session of ``owner`` out of the store, wherever the session itself is.

    ``writer`` makes the messages of an item. With a ``turn`` the stream has only what the
    session generates next from that place on, and is closed by the end of that. Pages that a
    ``follower`` reads are those of all who follow the session. Methods raise what
    `server.sessions.questions.read_log` raises.
    """

    sessions: Sessions
    session: str
    owner: str
    tokenizer: Tokenizer
    writer: ItemWriter
    turn: Place | None = None

    async def chunk(self, start: Place | None, follower: Follower | None = None) -> Chunk:
        """The next messages from ``start`` on, or from the oldest; none only at the end."""
        number = None if start is None else start.number
        if self.turn is not None:
            start = max(start or self.turn, self.turn)
            # What is before ``start`` may have been the end.
            number = max(start.number - 1, self.turn.number)
        found: list[bytes] = []
        size, end = 0, start
        while True:
            page = await self._page(number, follower)
            start = Place(page.log.start) if start is None else start
            end = max(end or start, start)
            if start > Place(page.log.end):
                raise invalid("turn" if start == self.turn else "offset", BEYOND)
            for place, after, entry in self._parts(page.log):
                if place >= end:
                    found += self._written(page, place, after, entry)
                    size += (after.token or num_tokens(entry)) - place.token
                end = max(end, after)
                if self.turn is not None and ends_turn(entry):
                    return Chunk(start, end, tuple(found), is_last=True, is_closed=True)
                if size >= CHUNK_TOKENS:
                    break
            is_last = end >= Place(page.log.end)
            if found or is_last:
                return Chunk(start, end, tuple(found), is_last)
            number = end.number

    async def tail(self) -> Chunk:
        """The end of the stream as it is now, without any message, none of which is written."""
        number = MAX_SEQ if self.turn is None else self.turn.number
        while True:
            log = (await self._page(number)).log
            if self.turn is not None and self.turn > Place(log.end):
                raise invalid("turn", BEYOND)
            ends = (place + 1 for place, entry in log.entries if ends_turn(entry))
            closed = None if self.turn is None else next(ends, None)
            number = log.start + len(log.entries)
            if closed is not None or number >= log.end:
                end = Place(log.end if closed is None else closed)
                return Chunk(end, end, (), is_last=True, is_closed=closed is not None)

    async def _page(self, number: int | None, follower: Follower | None = None) -> WrittenPage:
        """The log from entry ``number`` on, or from the oldest."""

        async def read() -> WrittenPage:
            return WrittenPage(await self.sessions.log(self.session, self.owner, number), {})

        if follower is None:
            return await read()
        return await follower.shared(number, read, ELSEWHERE_S)

    def _parts(self, log: LogPage) -> Iterator[tuple[Place, Place, Entry]]:
        """Where each entry begins and ends; a long prompt, where it is shown, part by part."""
        for number, entry in log.entries:
            size = num_tokens(entry) if self.writer.shows_input else 1
            for token in range(0, max(size, 1), CHUNK_TOKENS):
                is_last = token + CHUNK_TOKENS >= size
                after = Place(number + 1) if is_last else Place(number, token + CHUNK_TOKENS)
                yield Place(number, token), after, entry

    def _written(self, page: WrittenPage, place: Place, after: Place, entry: Entry) -> list[bytes]:
        """The messages of an entry, or of its tokens from ``place`` to ``after``."""
        key = self.writer.format, place
        if key not in page.written:
            item = self._item(entry, place.token, after.token or num_tokens(entry))
            page.written[key] = [] if item is None else self.writer.of(item)
        return page.written[key]

    def _item(self, entry: Entry, start: int, end: int) -> Item | None:
        if isinstance(entry, TokenEvent | Finished):
            return entry
        if isinstance(entry, Rewound):
            value = entry.value
            return RewoundItem(value.epoch, value.seq, value.length)
        if not isinstance(entry, Accepted):
            return None
        request, text = entry.request, ""
        if self.writer.shows_input:
            is_start = entry.length == 0
            text = text_within(self.tokenizer, entry.tokens, start, end, is_start)
        place = entry.seq, entry.length + start
        return FedItem(request.request_id, *place, end - start, text, request.sampling is not None)
