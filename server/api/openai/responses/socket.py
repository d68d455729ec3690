"""`/v1/responses` as a WebSocket: responses one after the other, or next to each other.

A client sends ``response.create`` with the body of `POST /v1/responses`, and gets
the events that HTTP would stream. What has one ``stream_id``, or none, is done in
order. What is not stored can be continued on the same socket, for a while: its
text is remembered here, and read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import orjson

from server.api.auth import Caller
from server.api.errors import error_object, outcome
from server.api.openai.responses.events import ResponseWriter, on_stream
from server.api.openai.responses.items import Json, Note
from server.api.openai.responses.prepare import (
    PreparedResponse,
    needs_sessions,
    prepare,
    stored_previous,
)
from server.api.openai.responses.schemas import ResponseCreate
from server.api.openai.responses.stored import FindTurn, ResponseTurn, history
from server.api.schemas.parse import in_thread_if_large, parse_body, without_mark
from server.api.sockets import Close, Socket
from server.engine.types import Event, Failed, Finished, Migrated
from server.errors import InternalFailure, InvalidRequest, QueueFull, RequestError, invalid
from server.models.registry import Models
from server.models.service import Service

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
