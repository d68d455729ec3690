"""`POST /v1/messages` and the tokens that it would read, as Anthropic's clients call them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, Literal, NotRequired

from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers
from typing_extensions import TypedDict

from server.api.answers import JsonAnswer, StreamAnswer, json_response
from server.api.anthropic.body import CountBody, MessagesBody, Translated, translated
from server.api.anthropic.writer import ERRORS as ERROR_SHAPE
from server.api.anthropic.writer import MessageWriter
from server.api.chat.prepare import num_prompt_tokens, prepared
from server.api.routing import EVENT_STREAM, Dialect, body_schema, errors_as, keyed, service_for
from server.api.schemas.parse import body_of, ignore
from server.api.schemas.requests import Continuation
from server.models.service import TOKEN_BYTES, Service

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
    errors=ERROR_SHAPE,
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
