"""Ollama's routes: chats, prompts, vectors."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers
from typing_extensions import TypedDict

from server.api.answers import JsonAnswer, LastEventsWriter, StreamAnswer, ended
from server.api.chat.prepare import PreparedChat, prepared
from server.api.ollama import catalogue
from server.api.ollama.body import (
    NAMES,
    EmbedBody,
    GenerateBody,
    GeneratingBody,
    OldEmbeddingsBody,
    OllamaChatBody,
    OllamaRequest,
    chat_of,
    chat_of_prompt,
    new_id,
    sampling_of_raw,
)
from server.api.ollama.catalogue import ollama_service
from server.api.ollama.writer import ERRORS as ERROR_SHAPE
from server.api.ollama.writer import (
    HEADERS,
    OllamaErrorAnswer,
    OllamaWriter,
    nanoseconds,
    shown_time,
)
from server.api.prepare import (
    embedding_requests,
    generate_request,
    renamed,
    unit_vector,
    vectors_bytes,
)
from server.api.routing import Dialect, answer_content, body_schema, errors_as, keyed
from server.api.schemas.parse import body_of
from server.api.schemas.requests import Continuation
from server.errors import InvalidRequest
from server.models.service import TOKEN_BYTES, Service


class OllamaAnswer(TypedDict, total=False):
    """The last line of a stream, or the whole answer; the others have ``done`` false."""

    model: str
    created_at: str
    message: dict[str, Any]
    response: str
    done: bool
    done_reason: str
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int
    prompt_cached_count: int


class OllamaVectors(TypedDict):
    """A unit vector for each input."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OneVector(TypedDict):
    """The unit vector of one text."""

    embedding: list[float]


#: So many are not translated in the event loop.
MANY_MESSAGES = 64

router = APIRouter()
_ERRORS = errors_as(OllamaErrorAnswer)
_LINES = _ERRORS | answer_content("application/x-ndjson", type="string")


@router.post(
    "/api/chat",
    response_model=OllamaAnswer,
    responses=_LINES,
    openapi_extra=body_schema(OllamaChatBody),
)
async def ollama_chat(request: Request) -> Response:
    """Answer messages as Ollama does: lines of JSON, or one object without stream."""
    body = await body_of(OllamaChatBody, request)
    service, wanted = _place(request, body)
    if not body.messages:
        return _loaded(body, {"message": {"role": "assistant", "content": ""}})
    if len(body.messages) > MANY_MESSAGES:
        chat = await asyncio.to_thread(chat_of, service, body, wanted)
    else:
        chat = chat_of(service, body, wanted)
    made = await prepared(service, request.state.owner, chat)
    return _answer(service, body, made, is_prompt=False)


@router.post(
    "/api/generate",
    response_model=OllamaAnswer,
    responses=_LINES,
    openapi_extra=body_schema(GenerateBody),
)
async def ollama_generate(request: Request) -> Response:
    """Answer one prompt, in the model's template unless it is raw."""
    body = await body_of(GenerateBody, request)
    service, wanted = _place(request, body)
    if not body.prompt:
        return _loaded(body, {"response": ""})
    owner = request.state.owner
    if not body.raw:
        made = await prepared(service, owner, chat_of_prompt(service, body, wanted))
        return _answer(service, body, made, is_prompt=True)
    try:
        sampling = sampling_of_raw(body)
        raw = await generate_request(service, new_id(), owner, body.prompt, wanted, sampling)
    except InvalidRequest as error:
        raise renamed(error, NAMES) from None
    return _answer(service, body, PreparedChat(raw, None), is_prompt=True)


def _place(request: Request, body: OllamaRequest) -> tuple[Service, Continuation]:
    service = ollama_service(request, body.model)
    return service, keyed(request, Continuation.model_construct(model=service.model.name))


def _answer(
    service: Service, body: GeneratingBody, made: PreparedChat, is_prompt: bool
) -> Response:
    writer = OllamaWriter(body.model, made, is_prompt, time.monotonic)
    if body.stream is not False:
        return StreamAnswer(service, made.request, writer)
    sampling = made.request.sampling
    size = 0 if sampling is None else sampling.max_tokens * TOKEN_BYTES
    service.large_answers.check(size, "options.num_predict", "options.num_predict")
    return JsonAnswer(service, made.request, writer, size)


def _loaded(body: OllamaRequest, said: dict[str, Any]) -> Response:
    """What Ollama says where it has loaded a model and nothing else: here all are loaded."""
    head = {"model": body.model, "created_at": shown_time()}
    line = orjson.dumps({**head, **said, "done": True, "done_reason": "load"}) + b"\n"
    return Response(line, media_type=HEADERS[0][1].decode())


@router.post(
    "/api/embed",
    response_model=OllamaVectors,
    responses=_ERRORS,
    openapi_extra=body_schema(EmbedBody),
)
async def ollama_embed(request: Request) -> Response:
    """A unit vector for each input."""
    body = await body_of(EmbedBody, request)
    service, begun_s = ollama_service(request, body.model), time.monotonic()
    inputs = [body.input] if isinstance(body.input, str) else body.input
    requests = await embedding_requests(service, new_id(), request.state.owner, [*inputs], "input")

    def whole(lasts: Any) -> Any:
        ends = [ended(lasts[each.request_id]) for each in requests]
        yield orjson.dumps(
            {
                "model": body.model,
                "embeddings": [unit_vector(end) for end in ends],
                "total_duration": nanoseconds(time.monotonic() - begun_s),
                "load_duration": 0,
                "prompt_eval_count": sum(end.usage.prompt_tokens for end in ends),
            }
        )

    return JsonAnswer(service, requests, LastEventsWriter(whole), vectors_bytes(service, requests))


@router.post(
    "/api/embeddings",
    response_model=OneVector,
    responses=_ERRORS,
    openapi_extra=body_schema(OldEmbeddingsBody),
)
async def ollama_embeddings(request: Request) -> Response:
    """The unit vector of one text."""
    body = await body_of(OldEmbeddingsBody, request)
    service = ollama_service(request, body.model)
    (asked,) = await embedding_requests(
        service, new_id(), request.state.owner, [body.prompt], "prompt"
    )

    def whole(lasts: Any) -> Any:
        yield orjson.dumps({"embedding": unit_vector(ended(lasts[asked.request_id]))})

    return JsonAnswer(service, [asked], LastEventsWriter(whole), vectors_bytes(service, [asked]))


router.routes.extend(catalogue.router.routes)


def _owns(path: str, headers: Headers) -> bool:
    return path.startswith("/api/")


DIALECT = Dialect(name="ollama", router=router, owns=_owns, errors=ERROR_SHAPE)
