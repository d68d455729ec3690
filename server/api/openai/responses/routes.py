"""`/v1/responses`: OpenAI's Responses API on kept sessions, over HTTP and as a WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema
from starlette.types import Receive, Scope, Send

from server.api.answers import (
    COMMENT_BETWEEN_IDS,
    ENDS,
    DirectWriter,
    LargeResponse,
    WatchedAnswer,
    json_response,
    send_stream,
    send_whole,
)
from server.api.auth import Caller
from server.api.connections import Close, Socket
from server.api.errors import SessionMigrated, error_object, outcome
from server.api.events import number_of
from server.api.openai.responses import items as answers
from server.api.openai.responses.events import SILENT, ResponseWriter, on_stream, sse
from server.api.openai.responses.items import Includes, Json, Note, ResponseCreate, ResponsesBody
from server.api.openai.responses.prepare import (
    PreparedResponse,
    needs_sessions,
    prepare,
    response_of_key,
    stored_previous,
)
from server.api.openai.responses.stored import (
    FindTurn,
    ResponseNotFound,
    ResponseTurn,
    StoredResponse,
    find,
    history,
)
from server.api.routing import (
    ERRORS,
    EVENT_STREAM,
    NO_MORE_EVENTS,
    body_schema,
    keyed,
    models_of,
    service_for,
)
from server.api.schemas.wire import (
    Flag,
    Label,
    Seq,
    body_of,
    in_thread_if_large,
    parse_body,
    without_mark,
)
from server.api.schemas.wire import Query as StrictQuery
from server.engine.types import Event, Failed, Finished, Migrated, Started
from server.errors import InternalFailure, InvalidRequest, QueueFull, RequestError, invalid
from server.models.registry import Models
from server.models.service import Service
from server.runtime.queues import EventQueue
from server.sessions.loader import Cursor
from server.sessions.sessions import NO_MORE
from server.store.base import HistoryGone

# -------------------------------------------------------------------------------------------------
# The answers to `POST /v1/responses` and to reading one again: whole, or as server-sent events.


#: So many are not written in the event loop.
MANY_EVENTS = 64


class ResponseAnswer(WatchedAnswer):
    """Writes what comes to its event queue until the response has ended."""

    comment = COMMENT_BETWEEN_IDS

    def __init__(self, service: Service, owner: str, writer: ResponseWriter, streams: bool) -> None:
        super().__init__(service)
        self._large, self._owner = service.large_answers, owner
        self._writer, self._streams = writer, streams

    def _encode(self, events: Sequence[Event]) -> list[bytes]:
        return [sse(written) for event in events for written in self._writer.write(event)]

    def _error(self, error: RequestError) -> bytes:
        return sse(self._writer.error(error))

    async def _answer(self, scope: Scope, send: Send) -> None:
        with self._large.reserve(self._owner, self._writer.note.num_bytes):
            if self._streams:
                await self._stream(scope, send)
            else:
                await self._begin()
                await send_whole(send, [await self._whole(await self._first_events())])

    async def _stream(self, scope: Scope, send: Send) -> None:
        direct = self._direct_writer(scope, self._encode)
        with direct:
            await self._begin()
            pieces = self._pieces(await self._first_events(), direct)
            await send_stream(send, pieces, self._error)

    async def _begin(self) -> None:
        """Raises the `RequestError` that is still a plain HTTP error."""
        raise NotImplementedError

    async def _first_events(self) -> list[Event]:
        """What there is to write first, if not a comment; nothing has been sent before."""
        events = await self._event_queue.take()
        for event in events:
            if isinstance(event, Failed):
                raise event.error
        return events

    async def _missed(self) -> list[Event]:
        """More of what is not to come through the event queue; nothing at the end."""
        return []

    async def _whole(self, events: list[Event]) -> bytes:
        while True:
            for event in events:
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Migrated):
                    raise SessionMigrated
            await self._chunk(events)
            if isinstance(events[-1], ENDS):
                return await self._large.run(lambda: orjson.dumps(self._writer.response()))
            events = await self._missed() or await self._event_queue.take(self._take_in)

    async def _pieces(
        self, events: list[Event], direct: DirectWriter[Event]
    ) -> AsyncGenerator[bytes, None]:
        yield await self._chunk(events) if events else self.comment
        while not (events and isinstance(events[-1], ENDS)):
            events = await self._missed()
            while not events:
                refused, events = await direct.take()
                yield b"".join(refused)
            yield await self._chunk(events)

    async def _chunk(self, events: Sequence[Event]) -> bytes:
        """What is streamed for ``events``; written in a thread where there are many, or the whole.

        Both the start and the end repeat what was asked for.
        """
        is_part = not isinstance(events[0], Started) and not isinstance(events[-1], Finished)
        if len(events) < MANY_EVENTS and is_part:
            return b"".join(self._encode(events))
        return await self._large.run(lambda: b"".join(self._encode(events)))

    def _take_in(self, events: Sequence[Event]) -> bool:
        """Without waking the reader, unless it is an end."""
        if isinstance(events[-1], ENDS):
            return False
        for event in events:
            self._writer.write(event)
        return True


class NewResponse(ResponseAnswer):
    """Makes a response. It ends when the client leaves, unless it is one in the background."""

    def __init__(self, prepared: PreparedResponse, streams: bool) -> None:
        writer = prepared.writer(-1 if streams else SILENT)
        super().__init__(prepared.service, prepared.request.owner, writer, streams)
        self._made = prepared
        self._was_refused = False  # what runs under its name then is another's

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            is_done = self._writer.is_over or self._was_refused
            if not is_done and not self._made.is_in_background:
                self._async_engine.requests.cancel(self._made.request.request_id)
            await self._made.end()

    async def _begin(self) -> None:
        try:
            self._made = await self._made.begin(self._event_queue)
        except RequestError:
            self._was_refused = True
            raise


class ReplayedResponse(ResponseAnswer):
    """Tells a response again, and continues with what comes.

    It takes what runs from the reader that it has: a connection that is gone is
    not always seen to be.
    """

    def __init__(self, kept: StoredResponse, streams: bool, after: int = -1) -> None:
        writer = kept.writer(after if streams else SILENT)
        super().__init__(kept.service, kept.owner, writer, streams)
        self._kept = kept
        self._id = f"{kept.note.id}-{secrets.token_hex(8)}"
        self._seq = self._last_seq = kept.keyed.first_seq
        self._is_live = False

    async def _begin(self) -> None:
        end, keyed = self._kept.keyed.finished, self._kept.keyed
        if end is not None:
            self._last_seq = end.seq
            return
        resumed = await self._sessions.resume(
            keyed.session,
            self._kept.owner,
            Cursor(keyed.first_seq),
            self._id,
            self._event_queue,
            take_over=True,
        )
        if resumed.reset is not None:
            raise HistoryGone(NO_MORE)
        self._last_seq, self._is_live = resumed.info.seq, resumed.info.busy

    async def _first_events(self) -> list[Event]:
        return [self._kept.started(), *await self._missed()]

    async def _missed(self) -> list[Event]:
        if self._seq < self._last_seq:
            events: list[Event] = [*await self._kept.events(self._seq)]
            if not events:
                raise HistoryGone(NO_MORE)
            events = [e for e in events if e.seq <= self._last_seq]  # type: ignore[union-attr]
            self._seq = events[-1].seq  # type: ignore[union-attr]
            return events
        if self._is_live:
            self._is_live = False
            self._async_engine.requests.caught_up(self._id)
        return []


async def in_background(prepared: PreparedResponse) -> bytes:
    """Begins ``prepared`` without a reader; returns the response as it is then."""
    sink: EventQueue[Event] = EventQueue(prepared.service.max_queued_events)
    begun = await prepared.begin(sink)
    prepared.service.async_engine.requests.release(sink)
    return orjson.dumps(begun.writer().response())


# -------------------------------------------------------------------------------------------------
# A response is what one request has generated in a session of its own. Its name is
# the key under which the store finds the request, so that what is read again comes
# from the log: after a lost connection, a crash or a restart as well.


router = APIRouter(prefix="/v1/responses")


class RetrieveQuery(StrictQuery):
    """`GET /v1/responses/{id}`: with ``stream``, the events after number ``starting_after``."""

    stream: Flag = False
    starting_after: Seq | SkipJsonSchema[None] = None
    include_obfuscation: Literal["false"] | SkipJsonSchema[None] = None
    include: Includes | SkipJsonSchema[None] = Field(None, alias="include[]")


class InputItemsQuery(StrictQuery):
    """`GET /v1/responses/{id}/input_items`: those after the one called ``after``."""

    after: Label | SkipJsonSchema[None] = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    include: Includes | SkipJsonSchema[None] = Field(None, alias="include[]")


@router.post(
    "",
    response_model=answers.ResponseObject,
    responses=ERRORS | EVENT_STREAM,
    openapi_extra=body_schema(ResponsesBody),
)
async def create_response(request: Request) -> Response:
    """Generate an answer: JSON, server-sent events with stream, or later with background."""
    body = keyed(request, await body_of(ResponsesBody, request))
    owner = request.state.owner
    service = await _service_for(request, body)
    if needs_sessions(body):
        request.state.caller.require("sessions")
    if (done := await _done_before(service, owner, body)) is not None:
        if body.background and not body.stream:
            return LargeResponse(await done.response(), media_type="application/json")
        return ReplayedResponse(done, bool(body.stream))
    prepared = await prepare(service, owner, body, stored_previous(service, owner))
    if body.background and not body.stream:
        return Response(await in_background(prepared), media_type="application/json")
    return NewResponse(prepared, bool(body.stream))


@router.get(
    "/{response_id}",
    response_model=answers.ResponseObject,
    responses=ERRORS | EVENT_STREAM | NO_MORE_EVENTS,
)
async def retrieve_response(
    request: Request,
    response_id: str,
    query: Annotated[RetrieveQuery, Query()],
    last_event_id: Annotated[str | SkipJsonSchema[None], Header()] = None,
) -> Response:
    """A response as it is now, or its events, those to come included."""
    if query.starting_after is not None and not query.stream:
        raise invalid("starting_after", "needs stream to be true")
    kept = await _find(request, response_id)
    if query.stream:
        if last_event_id:  # of an `EventSource` that comes back
            after = number_of(last_event_id)
            if await kept.has_all(after):
                return Response(status_code=204, headers={"cache-control": "no-store"})
        else:
            after = -1 if query.starting_after is None else query.starting_after
        return ReplayedResponse(kept, True, after)
    if kept.keyed.finished is None:  # where the server does not begin again by itself
        await kept.service.sessions.continue_unattended(kept.keyed.session, kept.owner)
    return LargeResponse(await kept.response(), media_type="application/json")


@router.post(
    "/{response_id}/cancel",
    response_model=answers.ResponseObject,
    responses=ERRORS,
)
async def cancel_response(request: Request, response_id: str) -> Response:
    """End a response; one that has ended stays as it is."""
    kept = await _find(request, response_id)
    if kept.keyed.finished is None:
        sessions, session = kept.service.sessions, kept.keyed.session
        await sessions.cancel(session, kept.owner)
        await sessions.info(session, kept.owner)  # the step that ends it comes before the answer
    return LargeResponse(await kept.response(), media_type="application/json")


@router.delete("/{response_id}", response_model=answers.ResponseDeleted, responses=ERRORS)
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a response and its session; those that continue from it stay."""
    kept = await _find(request, response_id)
    await kept.service.sessions.delete(kept.keyed.session, kept.owner)
    deleted: answers.ResponseDeleted = {"id": response_id, "object": "response", "deleted": True}
    return json_response(deleted)


@router.get(
    "/{response_id}/input_items",
    response_model=answers.InputItemList,
    responses=ERRORS,
)
async def input_items(
    request: Request, response_id: str, query: Annotated[InputItemsQuery, Query()]
) -> Response:
    """What a response was asked, without what came before it."""
    kept = await _find(request, response_id)
    items = kept.note.items if query.order == "asc" else kept.note.items[::-1]
    if query.after is not None:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise invalid("after", "is not an item of this response")
        items = items[ids.index(query.after) + 1 :]
    return json_response(_page(items, query.limit))


def _page(items: list[Json], limit: int) -> answers.InputItemList:
    shown = items[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }


async def _done_before(service: Service, owner: str, body: ResponsesBody) -> StoredResponse | None:
    """What was done under the body's key, if anything."""
    if body.idempotency_key is None:
        return None
    try:
        return await find([service], owner, response_of_key(service, owner, body.idempotency_key))
    except ResponseNotFound:
        return None


async def _service_for(request: Request, body: ResponsesBody) -> Service:
    """That of the body's model; where it names none, of the response that it continues from."""
    if body.model is None and body.previous_response_id is not None:
        with suppress(ResponseNotFound):
            return (await _find(request, body.previous_response_id)).service
    return service_for(request, body.model)


async def _find(request: Request, id: str) -> StoredResponse:
    """The response, whose model is held until the request is answered."""
    services: Iterable[Service] = [each.service for each in models_of(request).versions]
    kept = await find(services, request.state.owner, id)
    request.state.held.enter_context(kept.service.async_engine.use())
    return kept


# -------------------------------------------------------------------------------------------------
# `/v1/responses` as a WebSocket: responses one after the other, or next to each other.

logger = logging.getLogger("everstream.responses")

#: Responses that one socket remembers.
MAX_REMEMBERED = 16
#: What is remembered may take as many bytes as so many of the largest messages.
REMEMBERED_MESSAGES = 4


class RecentTurns:
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


@dataclass(slots=True, eq=False)
class LiveResponse:
    """A response that is being made on a socket."""

    prepared: PreparedResponse
    writer: ResponseWriter
    stream_id: str | None
    done: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def frames(self, event: Event) -> list[bytes]:
        if isinstance(event, Failed):
            return [error_frame(event.error, self.stream_id)]
        return [on_stream(written, self.stream_id) for written in self.writer.write(event)]


class ResponsesCodec:
    """The protocol of `/v1/responses` on one socket."""

    def __init__(self, models: Models, caller: Caller, socket: Socket) -> None:
        self._models, self._caller, self._socket = models, caller, socket
        self._owner = caller.tenant.name
        self._max_ids = models.default.limits.max_prompt_tokens
        self._max_requests = models.default.max_socket_requests
        self._max_waiting_bytes = models.default.max_message_bytes
        self._num_waiting_bytes = 0
        self._lanes: dict[str | None, deque[bytes]] = {}
        self._live: dict[str, LiveResponse] = {}
        self._remembered = RecentTurns(REMEMBERED_MESSAGES * models.default.max_message_bytes)

    # Server to client

    def frames(self, events: Sequence[Event]) -> list[bytes]:
        """The frames for ``events``; the last event of a response ends it."""
        frames: list[bytes] = []
        for event in events:
            if (live := self._live.get(event.request_id)) is None:
                continue
            frames += live.frames(event)
            if isinstance(event, Finished | Failed | Migrated) and not live.done.done():
                live.done.set_result(None)
        return frames

    def close_due(self) -> Close | None:
        """Never closes by itself."""
        return None

    # Client to server

    async def receive(self, text: str | None) -> None:
        """Counts a message before it is looked at, and keeps its bytes until its turn."""
        stream_id = None
        try:
            self._caller.request("generate")
            if text is None:
                raise InvalidRequest("frames must be text")
            body = text.encode()
            is_create, stream_id = await in_thread_if_large(len(body), lambda: _head(body))
            if not is_create:
                raise invalid("type", "must be response.create; there is no other message")
            if sum(map(len, self._lanes.values())) >= self._max_requests:
                raise QueueFull("too many responses on this socket")
            if self._num_waiting_bytes + len(body) > self._max_waiting_bytes:
                raise QueueFull("too many bytes wait on this socket")
        except RequestError as error:
            self._socket.reply(error_frame(error, stream_id))
            return
        self._num_waiting_bytes += len(body)
        lane = self._lanes.get(stream_id)
        if lane is not None:
            lane.append(body)
            return
        self._lanes[stream_id] = deque([body])
        self._socket.spawn(self._work_off(stream_id))

    async def _work_off(self, stream_id: str | None) -> None:
        """All that is asked for on one stream, in its order."""
        lane = self._lanes[stream_id]
        while lane:
            try:
                body, lane[0] = lane[0], b""
                await self._respond(body, stream_id)
            except RequestError as error:
                self._socket.reply(error_frame(error, stream_id))
            except Exception:  # ours; what else is asked for continues
                logger.exception("a response failed")
                failure = InternalFailure("the server failed; it has logged why")
                self._socket.reply(error_frame(failure, stream_id))
            lane.popleft()
        del self._lanes[stream_id]

    async def _respond(self, body: bytes, stream_id: str | None) -> None:
        with contextlib.ExitStack() as held:
            prepared = await self._prepare(body, held)
            live = self._begin(prepared, stream_id)
            try:
                live.prepared = await prepared.begin(self._socket.event_queue)
                await live.done
            except asyncio.CancelledError:  # with its socket: what is stored would continue
                prepared.service.async_engine.requests.cancel(prepared.request.request_id)
                raise
            finally:
                self._live.pop(prepared.request.request_id, None)
                await live.prepared.end()
        if not prepared.is_stored and live.writer.is_over:
            await self._remember(live)

    async def _prepare(self, body: bytes, held: contextlib.ExitStack) -> PreparedResponse:
        """What a message asks for; ``held`` keeps its model, which may be replaced meanwhile.

        Its bytes wait until it is prepared: parsed, they take many times their number.
        """
        try:
            message = await in_thread_if_large(
                len(body), lambda: parse_body(ResponseCreate, body, self._max_ids)
            )
            self._caller.require("generate")
            if needs_sessions(message):
                self._caller.require("sessions")
            name = message.model
            service = self._models.default if name is None else self._models.service(name)
            held.enter_context(service.async_engine.use())
            return await prepare(service, self._owner, message, self._find_previous(service))
        finally:
            self._num_waiting_bytes -= len(body)

    def _begin(self, prepared: PreparedResponse, stream_id: str | None) -> LiveResponse:
        self._socket.uses(prepared.service.async_engine)
        live = self._live[prepared.request.request_id] = LiveResponse(
            prepared, prepared.writer(), stream_id
        )
        return live

    # What is not stored

    def _find_previous(self, service: Service) -> FindTurn:
        """Among what this socket remembers, then in the store."""
        find_stored = stored_previous(service, self._owner)

        async def find_previous(id: str) -> ResponseTurn:
            return self._remembered.find(id) or await find_stored(id)

        return find_previous

    async def _remember(self, live: LiveResponse) -> None:
        """The whole conversation, so that nothing before it is needed."""

        async def output() -> list[Json]:
            written: list[Json] = live.writer.response()["output"]
            return written

        note = live.prepared.note
        with contextlib.suppress(InvalidRequest):  # what it continued is gone by now
            find_previous = self._find_previous(live.prepared.service)
            items = await history(find_previous, ResponseTurn(note, output))
            fields = {**note.fields, "previous_response_id": None}
            self._remembered.keep(replace(note, fields=fields, items=items))


def error_frame(error: RequestError, stream_id: str | None = None) -> bytes:
    """The event for what cannot be done."""
    status = outcome(error).status
    frame = {"type": "error", "status": status, "error": error_object(error)}
    return on_stream(orjson.dumps(frame), stream_id)


def _head(body: bytes) -> tuple[bool, str | None]:
    """Whether a message may be a ``response.create``, and its stream; it may be wrong in any way.

    What else it has is forgotten: parsed, it takes many times its bytes.
    """
    try:
        value = orjson.loads(without_mark(body))
    except orjson.JSONDecodeError:
        return True, None
    if not isinstance(value, dict):
        return True, None
    stream_id = value.get("stream_id")
    is_create = value.get("type", "response.create") == "response.create"
    return is_create, stream_id if isinstance(stream_id, str) else None
