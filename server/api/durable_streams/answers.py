"""The answers of a stream: a chunk, or what follows an offset for as long as the client waits."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from server.api.durable_streams.messages import Messages
from server.api.streaming import COMMENT, send_stream
from server.api.watched import WatchedAnswer
from server.models.service import Service
from server.runtime.followers import Follower
from server.sessions.log_stream import ELSEWHERE_S, Chunk, LogStream, Place, offset_of

#: How long a client waits for new messages until it is told to ask again.
LONG_POLL_S = 25.0
#: How long one answer of server-sent events lasts: about what the protocol says.
SSE_S = 60.0

#: A cursor is the number of such an interval since a day of the protocol's choice.
CURSOR_INTERVAL_S = 20
CURSOR_EPOCH_S = 1_728_432_000  # 2024-10-09T00:00:00Z
MAX_JITTER_S = 3600

SAFE = {
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "vary": "Authorization, Api-Key",
}
NO_STORE, NO_CACHE = "no-store", "no-cache, no-store"
#: What is followed by more never changes; what is at the end grows.
FULL, GROWING = "private, max-age=60, stale-while-revalidate=300", "private, no-cache"

_LINE_END = re.compile(rb"\r\n|\r|\n")


def cursor_after(theirs: int | None) -> int:
    """The present interval's number, or a greater one than the client's."""
    present = int(time.time() - CURSOR_EPOCH_S) // CURSOR_INTERVAL_S
    if theirs is None or theirs < present:
        return present
    return theirs + 1 + secrets.randbelow(MAX_JITTER_S // CURSOR_INTERVAL_S)


def head_of(chunk: Chunk, content_type: str, cache: str) -> dict[str, str]:
    """The headers of an answer that ends with ``chunk``."""
    headers = SAFE | {
        "content-type": content_type,
        "cache-control": cache,
        "stream-next-offset": offset_of(chunk.end),
    }
    if chunk.is_last:
        headers["stream-up-to-date"] = "true"
    if chunk.is_closed:
        headers["stream-closed"] = "true"
    return headers


def chunk_answer(
    messages: Messages, chunk: Chunk, if_none_match: str | None, more: dict[str, str]
) -> Response:
    """A chunk with its tag, or 304 to a client that has it."""
    headers = head_of(chunk, messages.content_type, GROWING if chunk.is_last else FULL) | more
    closed = ":c" if chunk.is_closed else ""
    tag = f'"{messages.session}:{offset_of(chunk.start)}:{offset_of(chunk.end)}{closed}"'
    headers["etag"] = tag
    if tag in (part.strip().removeprefix("W/") for part in (if_none_match or "").split(",")):
        return Response(status_code=304, headers=headers)
    return Response(messages.body(chunk.messages), headers=headers)


class FollowedAnswer(WatchedAnswer):
    """Follows a stream from ``start`` on, as no reader of the session: it may have one as well."""

    def __init__(
        self,
        service: Service,
        stream: LogStream,
        messages: Messages,
        start: Place | None,
        cursor: int | None,
    ) -> None:
        super().__init__(service)
        self._stream, self._messages = stream, messages
        self._start, self._cursor = start, cursor
        self._followers = service.async_engine.followers

    async def _answer(self, scope: Scope, send: Send) -> None:
        with self._followers.follow(self._stream.session, self._stream.owner) as follower:
            chunk = await self._chunk(self._start, follower)
            await self._follow(chunk, follower, scope, send)

    async def _follow(self, chunk: Chunk, follower: Follower, scope: Scope, send: Send) -> None:
        """Answers with ``chunk``, the first one, and what the follower reads after it."""
        raise NotImplementedError

    async def _chunk(self, start: Place | None, follower: Follower) -> Chunk:
        """See `LogStream.chunk`; made once for all whose streams are the same."""
        stream = self._stream
        key = stream.writer.format, stream.turn, start
        return await follower.shared(key, lambda: stream.chunk(start, follower), ELSEWHERE_S)

    async def _after(self, chunk: Chunk, follower: Follower, until_s: float) -> Chunk:
        """The next chunk with a message; one without where that does not come in time."""
        chunk = replace(chunk, start=chunk.end, messages=())
        max_wait_s = ELSEWHERE_S if self._sessions.are_shared else inf
        while not self._followers.has_ended and (left_s := until_s - time.monotonic()) > 0:
            if chunk.is_last:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, max_wait_s)):
                        await follower.changed.wait()
            follower.changed.clear()
            chunk = await self._chunk(chunk.end, follower)
            if chunk.messages or chunk.is_closed:
                break
        return chunk

    def _next_cursor(self) -> str:
        return str(cursor_after(self._cursor))


class FollowedPoll(FollowedAnswer):
    """The next chunk with a message, or 204 without one, after `LONG_POLL_S` at the latest."""

    async def _follow(self, chunk: Chunk, follower: Follower, scope: Scope, send: Send) -> None:
        if not chunk.messages and not chunk.is_closed:
            chunk = await self._after(chunk, follower, time.monotonic() + LONG_POLL_S)
        more = {"stream-cursor": self._next_cursor()}
        if chunk.messages:
            answer = chunk_answer(self._messages, chunk, None, more)
        else:
            head = head_of(chunk, self._messages.content_type, NO_STORE)
            answer = Response(status_code=204, headers=head | more)
        await answer(scope, _nothing, send)


class FollowedSse(FollowedAnswer):
    """Server-sent events for about `SSE_S`: each chunk, and where the stream is after it."""

    async def _follow(self, chunk: Chunk, follower: Follower, scope: Scope, send: Send) -> None:
        headers = SAFE | {"content-type": "text/event-stream", "cache-control": NO_CACHE}
        headers["x-accel-buffering"] = "no"
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        # Where it fails later, the client finds out why when it comes back.
        await send_stream(send, self._pieces(chunk, follower), lambda error: b"", encoded)

    async def _pieces(self, chunk: Chunk, follower: Follower) -> AsyncGenerator[bytes, None]:
        until_s = time.monotonic() + SSE_S
        yield self._events(chunk)
        while not chunk.is_closed:
            silent_until_s = min(until_s, time.monotonic() + (self._heartbeat_s or inf))
            chunk = await self._after(chunk, follower, silent_until_s)
            if chunk.messages or chunk.is_closed:
                yield self._events(chunk)
            elif silent_until_s == until_s or self._followers.has_ended:
                return
            else:
                yield COMMENT

    def _events(self, chunk: Chunk) -> bytes:
        control: dict[str, Any] = {"streamNextOffset": offset_of(chunk.end)}
        if chunk.is_last:
            control["upToDate"] = True
        if chunk.is_closed:
            control["streamClosed"] = True
        else:
            control["streamCursor"] = self._next_cursor()
        event = b"event: control\ndata:%b\n\n" % orjson.dumps(control)
        if chunk.messages:
            data = self._messages.body(chunk.messages)
            lines = b"".join(b"data:%b\n" % line for line in _LINE_END.split(data))
            event = b"event: data\n%b\n%b" % (lines, event)
        return event


async def _nothing() -> Message:
    raise AssertionError("these answers read nothing")
