"""`POST /v1/messages` and the tokens that it would read, as Anthropic's clients call them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal, NotRequired

import orjson
from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers
from typing_extensions import TypedDict

from server.api.answers import HEADERS, JsonAnswer, StreamAnswer, ended, json_response, server_sent
from server.api.anthropic.body import CountBody, MessagesBody, Translated, translated
from server.api.chat.calls import Arguments, CallBegins, Text
from server.api.chat.prepare import PreparedChat, num_prompt_tokens, prepared
from server.api.chat.reader import AnswerPiece, AnswerReader, StopFinder, Thought, WholeAnswer
from server.api.errors import ErrorShape, error_object, outcome
from server.api.routing import EVENT_STREAM, Dialect, body_schema, errors_as, keyed, service_for
from server.api.schemas.requests import Continuation
from server.api.schemas.wire import body_of, ignore
from server.engine.types import Event, Finished, Scored, Started, TokenEvent, Usage
from server.errors import RequestError
from server.models.service import TOKEN_BYTES, Service

# -------------------------------------------------------------------------------------------------
# Anthropic's answers: a ``message``, whole or as server-sent events, and errors.

#: Of these Anthropic's clients know that others can be served, and come back.
OVERLOADED = frozenset({"capacity_exhausted", "draining", "too_many_connections", "out_of_memory"})
OVERLOADED_STATUS = 529

#: By this the Python package sends a conversation again as a whole, and names no thread any more.
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    410: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "request_too_large",
    OVERLOADED_STATUS: "overloaded_error",
}


def status_of(error: RequestError) -> int:
    """The HTTP status of ``error``."""
    return OVERLOADED_STATUS if error.code in OVERLOADED else outcome(error).status


def anthropic_error(error: RequestError) -> dict[str, object]:
    """The object of an error, with our own ``code`` and ``param`` next to Anthropic's fields."""
    ours = error_object(error)
    shown: dict[str, object] = {
        "type": _TYPES.get(status_of(error), "api_error"),
        "message": ours["message"],
        "code": ours["code"],
        "param": ours["param"],
    }
    if error.param == "thread":
        shown["details"] = NO_THREADS
    return {"type": "error", "error": shown}


ERRORS = ErrorShape(lambda error: orjson.dumps(anthropic_error(error)), status_of)


Json = dict[str, Any]

#: Of thinking: Anthropic's clients send it back, and nothing here looks at it.
SIGNATURE = "everstream"

PING = server_sent(b'{"type": "ping"}', b"ping")


class MessageWriter:
    """Writes the one answer of ``chat``, which ends by one of ``stops`` or otherwise.

    Without ``shows_thoughts`` a block of thinking is empty.
    """

    headers = HEADERS
    comment = PING

    def __init__(
        self, service: Service, chat: PreparedChat, stops: list[str], shows_thoughts: bool
    ) -> None:
        request = chat.request
        self._id, self._model = request.request_id, service.model.name
        self._num_prompt_tokens = len(request.tokens)
        self._is_kept = request.keep
        self._thinks = request.sampling is not None and request.sampling.turn is not None
        self._shows_thoughts = shows_thoughts
        self._reader, self._stops = AnswerReader(chat.calls), StopFinder(stops, service.tokenizer)
        self._answer = WholeAnswer(self._reader)
        self._last: Event | None = None
        # The block that is open: its number, its type, and what is around a text's piece.
        self._index, self._kind = -1, ""
        self._around = b"", b""

    # Whole

    def add(self, event: Event) -> None:
        """Takes in an event of a whole answer."""
        if isinstance(event, TokenEvent):
            self._stops.add(event)
            self._answer.add(self._reader.read(event))
        elif isinstance(event, Started):
            self._start(event)
        elif not isinstance(event, Scored):
            self._last = event

    def whole(self) -> Iterator[bytes]:
        """The JSON answer; raises the `RequestError` that it ended by."""
        assert self._last is not None, self._id
        end = ended(self._last)
        self._answer.add(self._reader.finish(end))
        message = self._head(self._usage(end.usage)) | {"content": self._blocks()}
        yield orjson.dumps(message | self._reason(end))

    def _blocks(self) -> list[Json]:
        blocks: list[Json] = []
        if thoughts := self._answer.thoughts:
            blocks.append(self._thinking(thoughts if self._shows_thoughts else "") | _SIGNED)
        if text := self._answer.text:
            blocks.append({"type": "text", "text": text})
        calls = self._answer.calls
        return blocks + [{**_call(call.id, call.name), "input": call.given} for call in calls]

    # In events

    def token(self, event: TokenEvent) -> bytes:
        """The server-sent events for one token."""
        self._stops.add(event)
        return b"".join(map(self._piece, self._reader.read(event)))

    def chunks(self, event: Event) -> bytes:
        """The server-sent events for one event of the engine."""
        if isinstance(event, TokenEvent):
            return self.token(event)
        if isinstance(event, Scored):
            return b""
        if isinstance(event, Started):
            self._start(event)
            message = self._head(self._usage(Usage(self._num_prompt_tokens, 0))) | {"content": []}
            return _event("message_start", message=message)
        try:
            end = ended(event)
        except RequestError as error:
            return self.error(error)
        pieces = b"".join(map(self._piece, self._reader.finish(end)))
        usage = self._usage(end.usage)
        last = _event("message_delta", delta=self._reason(end), usage=usage)
        return pieces + self._close() + last + _event("message_stop")

    def end(self) -> bytes:
        """Nothing: the message has said that it is over."""
        return b""

    def error(self, error: RequestError) -> bytes:
        """What ends a stream that cannot be finished."""
        return server_sent(orjson.dumps(anthropic_error(error)), b"error")

    def _piece(self, piece: AnswerPiece) -> bytes:
        if isinstance(piece, Text):
            opened = self._open("text", {"type": "text", "text": ""})
            before, after = self._around
            return b"%b%b%b%b" % (opened, before, orjson.dumps(piece.text), after)
        if isinstance(piece, Thought):
            opened = self._open("thinking", self._thinking(""))
            if not self._shows_thoughts:
                return opened
            return opened + self._delta({"type": "thinking_delta", "thinking": piece.text})
        if isinstance(piece, CallBegins):
            call = _call(self._reader.new_call_id(piece.index), piece.name)
            return self._open(f"call {piece.index}", {**call, "input": {}})
        assert isinstance(piece, Arguments), piece
        return self._delta({"type": "input_json_delta", "partial_json": piece.text})

    def _open(self, kind: str, block: Json) -> bytes:
        """Begins a block unless one of this ``kind`` is open."""
        if kind == self._kind:
            return b""
        closed = self._close()
        self._index, self._kind = self._index + 1, kind
        if kind == "text":
            before, _, after = self._delta({"type": "text_delta", "text": "TEXT"}).partition(
                b'"TEXT"'
            )
            self._around = before, after
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        """Ends the block that is open, if there is one."""
        if not self._kind:
            return b""
        signed = b""
        if self._kind == "thinking":
            signed = self._delta({"type": "signature_delta", **_SIGNED})
        self._kind = ""
        return signed + _event("content_block_stop", index=self._index)

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    # Both

    def _start(self, event: Started) -> None:
        if self._is_kept:
            self._reader.start(event)

    def _head(self, usage: Json) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _reason(self, end: Finished) -> Json:
        """Why it ended. A call that was cut short does not count as one."""
        if end.finish_reason != "stop":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._reader.has_called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        stop = self._stops.found()
        return {
            "stop_reason": "end_turn" if stop is None else "stop_sequence",
            "stop_sequence": stop,
        }

    def _usage(self, usage: Usage) -> Json:
        """Tokens of the prompt are counted apart where the prefix cache had them.

        What the cache keeps of this prompt costs nothing, and is counted as none.
        """
        counts: Json = {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
        if self._thinks:
            counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
        return counts

    def _thinking(self, thoughts: str) -> Json:
        return {"type": "thinking", "thinking": thoughts, "signature": ""}


_SIGNED = {"signature": SIGNATURE}


def _event(kind: str, **fields: Any) -> bytes:
    return server_sent(orjson.dumps({"type": kind, **fields}), kind.encode())


def _call(id: str, name: str) -> Json:
    return {"type": "tool_use", "id": f"toolu_{id}", "name": name}


# -------------------------------------------------------------------------------------------------
# The routes.

#: That a client speaks Anthropic's API: every one of its libraries sends it.
VERSION_HEADER = "anthropic-version"


class AnthropicErrorDetail(TypedDict):
    """``type`` is Anthropic's word; ``code`` and ``param`` are those of all our errors."""

    type: str
    message: str
    code: str
    param: str | None


class AnthropicErrorAnswer(TypedDict):
    """Every error under these paths."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class MessageUsage(TypedDict):
    """Tokens; those of the prompt that the prefix cache had are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[dict[str, int]]


class MessageAnswer(TypedDict):
    """Anthropic's ``message``: blocks of thinking, of text, and of calls."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(TypedDict):
    """How many tokens the model would read."""

    input_tokens: int


router = APIRouter()
_ERRORS = errors_as(AnthropicErrorAnswer)


@router.post(
    "/v1/messages",
    response_model=MessageAnswer,
    responses=_ERRORS | EVENT_STREAM,
    openapi_extra=body_schema(MessagesBody),
)
async def create_message(request: Request) -> Response:
    """Answer messages as Anthropic's API does: JSON, or server-sent events with stream."""
    body = await body_of(MessagesBody, request)
    wanted = keyed(request, Continuation.model_construct(model=body.model))
    service = service_for(request, body.model)
    asked = await _translated(request, service, body, wanted)
    made = await prepared(service, request.state.owner, asked.chat)
    sampling = made.request.sampling
    num_bytes = 0 if sampling is None else sampling.max_tokens * TOKEN_BYTES
    service.large_answers.check(num_bytes, "max_tokens", "max_tokens")
    writer = MessageWriter(service, made, body.stop_sequences or [], asked.shows_thoughts)
    if body.stream:
        return StreamAnswer(service, made.request, writer)
    return JsonAnswer(service, made.request, writer, num_bytes)


@router.post(
    "/v1/messages/count_tokens",
    response_model=TokenCount,
    responses=_ERRORS,
    openapi_extra=body_schema(CountBody),
)
async def count_tokens(request: Request) -> Response:
    """How many tokens messages are for the model, with the tools and the system's text."""
    body = await body_of(CountBody, request)
    service = service_for(request, body.model)
    wanted = Continuation.model_construct(model=body.model)
    asked = await _translated(request, service, body, wanted)
    num_tokens = await num_prompt_tokens(service, request.state.owner, asked.chat)
    return json_response({"input_tokens": num_tokens})


async def _translated(
    request: Request, service: Service, body: CountBody, wanted: Continuation
) -> Translated:
    """In a thread: there may be many turns, blocks and tools."""
    asked = await asyncio.to_thread(translated, body, wanted, service.chat_template.thinking)
    ignore(request, *asked.ignored)
    return asked


def _owns(path: str, headers: Headers) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/") or VERSION_HEADER in headers


DIALECT = Dialect(
    name="anthropic",
    router=router,
    owns=_owns,
    errors=ERRORS,
    request_id_header="request-id",
)


# -------------------------------------------------------------------------------------------------
# Models, for the clients whose requests have the header.


class AnthropicModel(TypedDict):
    """A model as Anthropic's clients list it."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_tokens: int


def anthropic_model(service: Service) -> AnthropicModel:
    """The model of ``service``."""
    created = datetime.fromtimestamp(service.model.created_s, UTC)
    return {
        "type": "model",
        "id": service.model.name,
        "display_name": service.model.name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_tokens": service.limits.max_tokens,
    }
