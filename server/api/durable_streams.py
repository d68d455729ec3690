"""The log of a kept session as a read-only stream of the Durable Streams protocol."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Header, Query, Request
from pydantic.json_schema import SkipJsonSchema
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from server.api.answers import COMMENT, WatchedAnswer, send_stream
from server.api.events import EpochName, FrameWriter
from server.api.routing import ERRORS, Responses, service_with
from server.api.schemas.wire import StreamQuery
from server.engine.types import Finished
from server.errors import invalid
from server.models.service import Service
from server.runtime.readers import Follower
from server.sessions.log_text import (
    ELSEWHERE_S,
    Chunk,
    FedItem,
    Item,
    LogStream,
    Place,
    RewoundItem,
    ends_turn,
    offset_of,
    place_of,
)

# -------------------------------------------------------------------------------------------------
# What the items of a session's log are as messages of a stream, in each of its formats.
#
# A message depends on its item alone, so that it is the same whenever and wherever it is read.


Format = Literal["events", "text", "ai-sdk", "ag-ui"]


@dataclass(frozen=True, slots=True)
class Messages:
    """Writes the messages of one session in one format."""

    session: str
    format: Format
    epoch_name: EpochName

    @property
    def content_type(self) -> str:
        return "text/plain; charset=utf-8" if self.format == "text" else "application/json"

    @property
    def shows_input(self) -> bool:
        """See `server.sessions.log_text.ItemWriter`."""
        return self.format in ("events", "text")

    def of(self, item: Item) -> list[bytes]:
        """Those of ``item``; most have one, and some have none."""
        return _WRITERS[self.format](self, item)

    def body(self, messages: Sequence[bytes]) -> bytes:
        """As the body of an answer."""
        return b"".join(messages) if self.format == "text" else b"[%b]" % b",".join(messages)


def _events(messages: Messages, item: Item) -> list[bytes]:
    """The frames of `/v1/stream`, and what each request began with."""
    if isinstance(item, FedItem):
        return _json(
            {
                "type": "input",
                "request_id": item.request_id,
                "seq": item.seq,
                "position": item.position,
                "tokens": item.num_tokens,
                "text": item.text,
            }
        )
    if isinstance(item, RewoundItem):
        return _json(
            {
                "type": "rewound",
                "session": messages.session,
                "epoch": messages.epoch_name(item.epoch),
                "seq": item.seq,
                "position": item.position,
            }
        )
    frame = FrameWriter(item.request_id, None, messages.epoch_name).frame(item)
    return [] if frame is None else [frame]


def _text(messages: Messages, item: Item) -> list[bytes]:
    """What the session reads and generates."""
    return [] if isinstance(item, RewoundItem) or not item.text else [item.text.encode()]


def _ai_sdk(messages: Messages, item: Item) -> list[bytes]:
    """What is generated, as the Vercel AI SDK's ``UIMessageChunk``."""
    if isinstance(item, RewoundItem):
        return []
    id, found = item.request_id, list[dict[str, Any]]()
    if isinstance(item, FedItem):
        begin = {"type": "start", "messageId": id}, {"type": "text-start", "id": id}
        return _json(*begin) if item.generates else []
    if item.text:
        found.append({"type": "text-delta", "id": id, "delta": item.text})
    if isinstance(item, Finished) and ends_turn(item):
        found.append({"type": "text-end", "id": id})
        failed = {"type": "error", "errorText": item.error}
        found.append({"type": "finish"} if item.error is None else failed)
    return _json(*found)


def _ag_ui(messages: Messages, item: Item) -> list[bytes]:
    """What is generated, as events of AG-UI, which TanStack AI reads."""
    if isinstance(item, RewoundItem):
        return []
    id, found = item.request_id, list[dict[str, Any]]()
    run = {"threadId": messages.session, "runId": id}
    if isinstance(item, FedItem):
        message = {"type": "TEXT_MESSAGE_START", "messageId": id, "role": "assistant"}
        return _json({"type": "RUN_STARTED", **run}, message) if item.generates else []
    if item.text:
        found.append({"type": "TEXT_MESSAGE_CONTENT", "messageId": id, "delta": item.text})
    if isinstance(item, Finished) and ends_turn(item):
        found.append({"type": "TEXT_MESSAGE_END", "messageId": id})
        failed = {"type": "RUN_ERROR", "message": item.error}
        found.append({"type": "RUN_FINISHED", **run} if item.error is None else failed)
    return _json(*found)


def _json(*messages: dict[str, Any]) -> list[bytes]:
    return [orjson.dumps(message) for message in messages]


_WRITERS: Mapping[Format, Callable[[Messages, Item], list[bytes]]] = {
    "events": _events,
    "text": _text,
    "ai-sdk": _ai_sdk,
    "ag-ui": _ag_ui,
}


# -------------------------------------------------------------------------------------------------
# The answers of a stream: a chunk, or what follows an offset for as long as the client waits.


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


# -------------------------------------------------------------------------------------------------
# The route of a session's log as a durable stream: read by GET and HEAD, written by nothing.


router = APIRouter(prefix="/v1/sessions")

_CONTENT = {
    "application/json": {"schema": {"type": "array", "items": {"type": "object"}}},
    "text/plain": {"schema": {"type": "string"}},
    "text/event-stream": {},
}
ANSWERS: Responses = {
    200: {"content": _CONTENT},
    204: {"description": "nothing new came while the client waited"},
    304: {"description": "the client has this chunk"},
}


@router.get("/{session}/stream", response_class=Response, responses=ERRORS | ANSWERS)
async def stream(
    request: Request,
    session: str,
    query: Annotated[StreamQuery, Query()],
    if_none_match: Annotated[str | SkipJsonSchema[None], Header()] = None,
) -> Response:
    """What a session reads and generates, as a read-only stream of the Durable Streams protocol."""
    for name in ("offset", "live", "cursor", "format", "turn"):
        if len(request.query_params.getlist(name)) > 1:
            raise invalid(name, "must be given once")
    service, owner = await service_with(request, session), request.state.owner
    messages = Messages(session, query.format, service.async_engine.epoch_name)
    turn = None if query.turn is None else place_of(query.turn, "turn")
    log = LogStream(service.sessions, session, owner, service.tokenizer, messages, turn)
    if request.state.is_head:
        return Response(headers=head_of(await log.tail(), messages.content_type, NO_STORE))
    if query.live is not None and query.offset is None:
        raise invalid("offset", "is necessary with live")
    start = None
    if query.offset == "now":
        tail = await log.tail()
        if query.live is None:
            headers = head_of(tail, messages.content_type, NO_STORE)
            return Response(messages.body(()), headers=headers)
        start = tail.end
    elif query.offset not in (None, "-1"):
        start = place_of(query.offset)
    if query.live is None:
        return chunk_answer(messages, await log.chunk(start), if_none_match, {})
    live = FollowedSse if query.live == "sse" else FollowedPoll
    return live(service, log, messages, start, query.cursor)
