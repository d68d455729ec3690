"""`/v1/stream`: many generations over one socket, each under the client's name for it.

Its description, `/asyncapi.json`, is written by the models that validate its messages.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args, get_type_hints

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from orjson import dumps
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from server.api.auth import MESSAGES, SUBPROTOCOL, Caller, Keyring, RateLimited
from server.api.connections import Close, Socket
from server.api.events import FrameWriter, created_frame, encode, error_frame, forked, resumed_frame
from server.api.prepare import append_request, generate_request
from server.api.routing import REF
from server.api.schemas import requests as schemas
from server.api.schemas.requests import MESSAGE_TYPES, Message
from server.api.schemas.responses import (
    AnyFrame,
    DeletedFrame,
    DetachedFrame,
    ForkedFrame,
    RewoundFrame,
)
from server.api.schemas.wire import in_thread_if_large, parse_tagged, without_mark
from server.engine.types import Event, Failed, Finished, Migrated, Request, TokenEvent
from server.errors import InternalFailure, InvalidRequest, QueueFull, RequestError, invalid
from server.models.registry import Models
from server.models.service import Service
from server.runtime.async_engine import AsyncEngine
from server.sessions.loader import Cursor, Resumed
from server.sessions.sessions import KeyInUse
from server.store.base import Keyed

# -------------------------------------------------------------------------------------------------
# A client's frame, and the name of the request that it is about.

_MESSAGE: TypeAdapter[Message] = TypeAdapter(Message)

_REQUEST_ID = re.compile(r'"request_id"\s*:\s*"([^"\\\x00-\x1f]{1,64})"')


def parse_message(text: str, max_ids: int | None = None) -> Message:
    """A client's frame; like `server.api.schemas.wire.parse_body`."""
    return parse_tagged(_MESSAGE, MESSAGE_TYPES, text, max_ids)


def named_in(text: str) -> str | None:
    """What looks like the ``request_id`` of a frame that is not worth parsing."""
    found = _REQUEST_ID.search(text)
    return None if found is None else found[1]


def request_id_of(text: str) -> str | None:
    """The ``request_id`` of a frame that is not a message, to answer it by.

    Read by Python's lenient parser: a NaN or a lone surrogate elsewhere in the
    frame is no reason to leave its sender without an answer.
    """
    try:
        frame = json.loads(without_mark(text))
        found = frame.get("request_id") if isinstance(frame, dict) else None
        if isinstance(found, str) and len(found) <= 64 and found.encode():
            return found
    except (ValueError, RecursionError):  # not JSON, or an id that is not Unicode text
        pass
    return None


# -------------------------------------------------------------------------------------------------
# The answers to messages of a socket that are about a session and run nothing.


Asked = schemas.Delete | schemas.Fork | schemas.Rewind


async def create(service: Service, message: schemas.Create, owner: str) -> bytes:
    """The answer to ``create``. Raises `RequestError`."""
    info = await service.sessions.create(owner, message.state)
    return created_frame(message.request_id, info, service.async_engine.epoch_name)


async def answer(service: Service, message: Asked, owner: str) -> bytes:
    """The answer to ``message``, whose session ``service`` has. Raises `RequestError`."""
    sessions, epoch_name = service.sessions, service.async_engine.epoch_name
    id, session = message.request_id, message.session
    if isinstance(message, schemas.Delete):
        await sessions.delete(session, owner)
        deleted: DeletedFrame = {"type": "deleted", "request_id": id, "session": session}
        return encode(deleted)
    if isinstance(message, schemas.Fork):
        forks = await sessions.fork(session, owner, message.n or 1, message.at)
        frame: ForkedFrame = {
            "type": "forked",
            "request_id": id,
            **forked(session, forks, epoch_name),
        }
        return encode(frame)
    info = await sessions.rewind(session, owner, message.at)
    rewound: RewoundFrame = {
        "type": "rewound",
        "request_id": id,
        "session": session,
        "epoch": epoch_name(info.epoch),
        "seq": info.seq,
        "position": info.position,
    }
    return encode(rewound)


logger = logging.getLogger("everstream.stream")

#: A frame over the rate limit is read up to this size: a cancel has less.
MAX_EXCESS_CHARS = 1024

#: How a socket ends whose requests continue in another replica.
MOVED = Close(1012, "the session continues at another server")


@dataclass(slots=True)
class StreamRequest:
    """A live request, and the model that it runs on.

    ``cancelled``: its client wants its end, which what is being resumed gets once
    it has been found.
    """

    writer: FrameWriter
    service: Service
    cancelled: bool = False

    @property
    def async_engine(self) -> AsyncEngine:
        return self.service.async_engine


class StreamCodec:
    """The protocol of `/v1/stream` on one socket: many requests by the client's names."""

    def __init__(self, models: Models, caller: Caller, socket: Socket) -> None:
        self._models, self._caller, self._socket = models, caller, socket
        self._event_queue, self._reply = socket.event_queue, socket.reply
        self._owner = caller.tenant.name
        self._max_ids = models.default.limits.max_prompt_tokens
        self._max_requests = models.default.max_socket_requests
        self._prefix = secrets.token_hex(8)
        self._num_begun = 0
        self._alive: dict[str, StreamRequest] = {}  # by the engine's names
        self._ids: dict[str, str] = {}  # the engine's names by the client's
        self._has_migrated = False

    # Server to client

    def frames(self, events: Sequence[Event]) -> list[bytes]:
        """The frames for ``events``; those of a request that was detached have none."""
        frames = []
        for event in events:
            if (alive := self._alive.get(event.request_id)) is None:
                continue
            if isinstance(event, TokenEvent):  # first, because nearly all are
                frames.append(alive.writer.token(event))
                continue
            if isinstance(event, Finished | Failed | Migrated):
                self._has_migrated |= isinstance(event, Migrated)
                self._end(event.request_id)
            if (frame := alive.writer.frame(event)) is not None:
                frames.append(frame)
        return frames

    def close_due(self) -> Close | None:
        """Closes a socket whose last requests moved, so that the next one may lead elsewhere."""
        has_migrated, self._has_migrated = self._has_migrated, False
        return MOVED if has_migrated and not self._alive else None

    # Client to server

    async def receive(self, text: str | None) -> None:
        """Counts a frame before it is parsed; what is over the limit is parsed only if short."""
        excess: RateLimited | None = None
        try:
            self._caller.tenant.request()
        except RateLimited as error:
            excess = error
            if text is None or len(text) > MAX_EXCESS_CHARS:
                self._reply(error_frame(named_in(text or ""), error))
                return
        if text is None:
            self._reply(error_frame(None, InvalidRequest("frames must be text")))
            return
        try:
            message = await in_thread_if_large(
                len(text), lambda: parse_message(text, self._max_ids)
            )
        except InvalidRequest as error:
            id = await in_thread_if_large(len(text), lambda: request_id_of(text))
            self._reply(error_frame(id, excess or error))
            return
        try:
            self._check_excess(message, excess)
            await self._handle(message)
        except RequestError as error:
            self._reply(error_frame(message.request_id, error))
        except Exception:  # ours; what else the socket does continues
            logger.exception("a message failed")
            failure = InternalFailure("the server failed; it has logged why")
            self._reply(error_frame(message.request_id, failure))

    def _check_excess(self, message: schemas.Message, excess: RateLimited | None) -> None:
        """Raises it for all but what gives something back, which is counted all the same."""
        if excess is None:
            return
        if MESSAGES[message.type] is not None:
            raise excess
        self._caller.tenant.count()

    async def _handle(self, message: schemas.Message) -> None:
        if (wanted := MESSAGES[message.type]) is not None:
            self._caller.require(wanted)
        if isinstance(message, schemas.Cancel):
            # Without effect on what is not alive: its last frame was the answer.
            if (id := self._ids.get(message.request_id)) is not None:
                self._alive[id].cancelled = True
                self._alive[id].async_engine.requests.cancel(id)
        elif isinstance(message, schemas.Detach):
            self._detach(message)
        elif isinstance(message, schemas.Resume):
            self._check_free(message.request_id)
            await self._resume(message)
        elif isinstance(message, schemas.Generate | schemas.Append):
            await self._start(message)
        elif isinstance(message, schemas.Create):
            service = self._of_model(message.model)
            with service.async_engine.use():
                frame = await create(service, message, self._owner)
            self._reply(frame)
        else:
            service = await self._models.holding(message.session, self._owner)
            with service.async_engine.use():
                frame = await answer(service, message, self._owner)
            self._reply(frame)

    def _of_model(self, name: str | None) -> Service:
        return self._models.default if name is None else self._models.service(name)

    async def _service_for(self, message: schemas.Generate | schemas.Append) -> Service:
        """Where the message's session is, or its model."""
        if message.session is None:
            return self._of_model(message.model)
        model = message.model if isinstance(message, schemas.Generate) else None
        return await self._models.holding(message.session, self._owner, model)

    def _check_free(self, request_id: str) -> None:
        if request_id in self._ids:
            raise invalid("request_id", "names a live request of this socket")
        if len(self._alive) >= self._max_requests:
            raise QueueFull("too many requests on this socket")

    async def _start(self, message: schemas.Generate | schemas.Append) -> None:
        self._check_free(message.request_id)
        service = await self._service_for(message)
        with service.async_engine.use():  # it may be replaced meanwhile
            request = await self._translate(service, message)
            self._begin(request.request_id, message.request_id, service, request)
            found: Keyed | None = None
            try:
                if request.key is None:
                    await service.sessions.submit(request, self._event_queue)
                else:
                    found = await service.keys.submit_once(request, self._event_queue)
            except RequestError:
                self._end(request.request_id)
                raise
        if found is not None:
            self._repeat(service, request.request_id, found)

    def _repeat(self, service: Service, id: str, found: Keyed) -> None:
        """Answers again what has been done under the same key."""
        if not found.is_append:
            again = partial(service.keys.resume, self._owner, found, id, self._event_queue)
            self._socket.spawn(self._catch_up(id, again))
            return
        writer = self._end(id)
        if found.finished is None:
            raise KeyInUse
        self._reply(writer.finished(found.finished))

    def _new_id(self, request_id: str) -> str:
        """The engine's name: a request that was left may still be there under the client's."""
        self._num_begun += 1
        return f"{self._prefix}-{self._num_begun}-{request_id}"

    def _begin(self, id: str, request_id: str, service: Service, request: Request | None) -> None:
        self._socket.uses(service.async_engine)
        self._ids[request_id] = id
        writer = FrameWriter(request_id, request, service.async_engine.epoch_name)
        self._alive[id] = StreamRequest(writer, service)

    def _end(self, id: str) -> FrameWriter:
        writer = self._alive.pop(id).writer
        del self._ids[writer.request_id]
        return writer

    async def _translate(
        self, service: Service, message: schemas.Generate | schemas.Append
    ) -> Request:
        id = self._new_id(message.request_id)
        if isinstance(message, schemas.Append):
            return await append_request(service, id, self._owner, message.session, message)
        if message.session is not None or message.keep or message.idempotency_key is not None:
            self._caller.require("sessions")
        return await generate_request(
            *(service, id, self._owner, message.prompt, message, message), prefixed=message
        )

    def _detach(self, message: schemas.Detach) -> None:
        """Without effect on what is not alive, as a cancel is."""
        if (id := self._ids.get(message.request_id)) is not None:
            async_engine = self._alive[id].async_engine
            self._end(id)
            async_engine.requests.detach(id)
            frame: DetachedFrame = {"type": "detached", "request_id": message.request_id}
            self._reply(encode(frame))

    async def _resume(self, message: schemas.Resume) -> None:
        service = await self._models.holding(message.session, self._owner)
        cursor = Cursor(message.last_seq, message.epoch)
        id = self._new_id(message.request_id)
        self._begin(id, message.request_id, service, None)
        resume = partial(
            service.sessions.resume,
            message.session,
            self._owner,
            cursor,
            id,
            self._event_queue,
            bool(message.take_over),
        )
        self._socket.spawn(self._catch_up(id, resume))

    async def _catch_up(self, id: str, resume: Callable[[], Awaitable[Resumed]]) -> None:
        """Sends what was missed; runs next to what else the socket does."""
        if (alive := self._alive.get(id)) is None:  # detached before it began
            return
        with alive.async_engine.use():
            await self._send_missed(id, alive, resume)

    async def _send_missed(
        self, id: str, alive: StreamRequest, resume: Callable[[], Awaitable[Resumed]]
    ) -> None:
        writer, event_queue, async_engine = alive.writer, self._event_queue, alive.async_engine
        try:
            resumed = await resume()
            if id not in self._alive:  # detached meanwhile, perhaps before it was attached
                async_engine.requests.detach(id)
                return
            if alive.cancelled:
                async_engine.requests.cancel(id)
            self._reply(resumed_frame(writer.request_id, resumed, async_engine.epoch_name))
            async for events in alive.service.sessions.missed(self._owner, resumed, id):
                await event_queue.emptied()
                if id not in self._alive:
                    return
                event_queue.put([frame for e in events if (frame := writer.frame(e)) is not None])
            if resumed.info.busy:
                async_engine.requests.caught_up(id)
            elif id in self._alive:
                self._end(id)
        except RequestError as error:
            async_engine.requests.detach(id)
            if id in self._alive:
                self._end(id)
                self._reply(error_frame(writer.request_id, error))


# -------------------------------------------------------------------------------------------------
# The document at `/asyncapi.json`: `/v1/stream` in AsyncAPI 3.
#
# https://www.asyncapi.com/docs/reference/specification/v3.0.0. Operations are those
# of the server: it receives a client's message, and replies with frames.

ADDRESS = "/v1/stream"

#: The frames that answer each message. Every message may be answered with an error as well.
REPLIES: dict[str, tuple[str, ...]] = {
    "create": ("created",),
    "generate": ("started", "token", "finished", "migrate", "resumed"),
    "append": ("appended", "migrate"),
    "cancel": ("finished",),
    "delete": ("deleted",),
    "fork": ("forked",),
    "rewind": ("rewound",),
    "resume": ("resumed", "reset", "token", "finished", "migrate"),
    "detach": ("detached",),
}

router = APIRouter(include_in_schema=False)


@router.get("/asyncapi.json")
async def asyncapi(request: HttpRequest) -> Response:
    """The document, with the address that it was asked for at."""
    keyring: Keyring = request.app.state.keyring
    wants_key = keyring.caller(None) is None
    is_secure = request.url.scheme in ("https", "wss")
    made = document(request.app.version, request.url.netloc, wants_key, is_secure)
    return Response(dumps(made), media_type="application/json")


def document(version: str, host: str, wants_key: bool, is_secure: bool = False) -> dict[str, Any]:
    """The AsyncAPI document of a server at ``host``."""
    messages, frames = _by_type(Message), _by_type(AnyFrame)
    server: dict[str, Any] = {"host": host, "protocol": "wss" if is_secure else "ws"}
    if wants_key:
        server["security"] = [{"$ref": "#/components/securitySchemes/key"}]
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Everstream",
            "version": version,
            "description": "Token streams of many sessions over one WebSocket. "
            f"A client may offer the subprotocol {SUBPROTOCOL}.",
        },
        "defaultContentType": "application/json",
        "servers": {"here": server},
        "channels": {
            "stream": {
                "address": ADDRESS,
                "messages": {
                    name: {"$ref": f"#/components/messages/{name}"} for name in messages | frames
                },
                "bindings": {"ws": {"method": "GET", "bindingVersion": "0.1.0"}},
            }
        },
        "operations": {name: _operation(name) for name in messages},
        "components": {
            "messages": {
                name: _message(name, described) for name, described in (messages | frames).items()
            },
            "schemas": _schemas([*messages.values(), *frames.values()]),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "correlationIds": {
                "request": {
                    "description": "The client's name for its message.",
                    "location": "$message.payload#/request_id",
                }
            },
        },
    }


def _by_type(union: Any) -> dict[str, type]:
    """The types of a union by what they have in ``type``."""
    types: Iterable[type] = get_args(get_args(union)[0])
    return {get_args(get_type_hints(each)["type"])[0]: each for each in types}


def _name(described: type) -> str:
    """What the document calls a message or a frame."""
    return described.__name__.removesuffix("Frame")


def _operation(name: str) -> dict[str, Any]:
    channel = {"$ref": "#/channels/stream"}
    return {
        "action": "receive",
        "channel": channel,
        "messages": [_of_channel(name)],
        "reply": {
            "channel": channel,
            "messages": [_of_channel(reply) for reply in (*REPLIES[name], "error")],
        },
    }


def _of_channel(name: str) -> dict[str, str]:
    return {"$ref": f"#/channels/stream/messages/{name}"}


def _message(name: str, described: type) -> dict[str, Any]:
    return {
        "name": name,
        "title": name,
        "summary": (described.__doc__ or "").strip().partition("\n")[0],
        "payload": {"$ref": REF + _name(described)},
        "correlationId": {"$ref": "#/components/correlationIds/request"},
    }


def _schemas(types: Iterable[type]) -> dict[str, Any]:
    """The schema of every type under its own name, and those of its parts."""
    mode: JsonSchemaMode = "validation"
    inputs = [(each.__name__, mode, TypeAdapter[Any](each)) for each in types]
    _, made = TypeAdapter.json_schemas(inputs, ref_template=REF + "{model}")
    found: dict[str, Any] = _plain(made["$defs"])
    for each in types:
        schema = found.pop(each.__name__)
        found[_name(each)] = schema | {"title": _name(each)}
    return dict(sorted(found.items()))


def _plain(schema: Any) -> Any:
    """AsyncAPI's discriminator is the name of a property alone."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: _plain(value) for name, value in schema.items()}
    if isinstance(found := plain.get("discriminator"), dict) and "propertyName" in found:
        plain["discriminator"] = found["propertyName"]
    return plain
