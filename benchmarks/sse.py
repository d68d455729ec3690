"""Server-sent events, read as WHATWG HTML section 9.2 says: bytes in, events out.

One parser for the tests and the benchmarks; our clients have their own, so that a mistake in
theirs is not hidden. It is strict: an unknown field is an error, and so is an incomplete event at
the end of a whole body.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

DONE = "[DONE]"

#: A carriage return at the end of what was read may be followed by its newline.
_LINE_END = re.compile(rb"\r?\n|\r(?=.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event: its data, and its own ``id`` and ``event`` lines if it has them."""

    data: str
    id: str | None = None
    name: str | None = None

    @property
    def value(self) -> Any:
        """The data as JSON."""
        return json.loads(self.data)


class SseParser:
    """Feed it what is read, in pieces of any size."""

    def __init__(self) -> None:
        self.num_comments = 0
        self._rest = b""
        self._data: list[str] = []
        self._fields: dict[str, str] = {}

    @property
    def is_between_events(self) -> bool:
        """Whether all that was fed belongs to a whole event or comment."""
        return not (self._rest.strip(b"\r") or self._data or self._fields)

    def feed(self, data: bytes) -> list[SseEvent]:
        """The events that end in ``data``. Raises `ValueError`."""
        *lines, self._rest = _LINE_END.split(self._rest + data)
        events = []
        for line in lines:
            if line:
                self._take(line.decode())
                continue
            if self._data:
                fields = self._fields
                events.append(
                    SseEvent("\n".join(self._data), fields.get("id"), fields.get("event"))
                )
            self._data, self._fields = [], {}
        return events

    def _take(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name in ("id", "event"):
            self._fields[name] = value
        elif name == "":
            self.num_comments += 1
        else:
            raise ValueError(f"not a field of server-sent events: {line!r}")


def events_of(body: bytes | str) -> list[SseEvent]:
    """All events of a whole body. Raises `ValueError` where the last one is incomplete."""
    parser = SseParser()
    events = parser.feed(body.encode() if isinstance(body, str) else body)
    if not parser.is_between_events:
        raise ValueError(f"incomplete event at the end: {body[-200:]!r}")
    return events


def values_of(body: bytes | str, done: bool = False) -> list[Any]:
    """The JSON of all events of a body. Raises `ValueError`.

    With ``done`` a last event ``[DONE]`` is required, and left out; without it none is allowed.
    """
    events = events_of(body)
    if done and (not events or events.pop() != SseEvent(DONE)):
        raise ValueError(f"the last event is not {DONE}: {body[-200:]!r}")
    return [event.value for event in events]


async def read(chunks: AsyncIterable[bytes]) -> AsyncGenerator[SseEvent]:
    """Each event as it arrives, for example in ``httpx``'s ``response.aiter_bytes()``."""
    parser = SseParser()
    async for chunk in chunks:
        for event in parser.feed(chunk):
            yield event


def read_blocking(chunks: Iterable[bytes]) -> Generator[SseEvent]:
    """The same for ``response.iter_bytes()``."""
    parser = SseParser()
    for chunk in chunks:
        yield from parser.feed(chunk)
