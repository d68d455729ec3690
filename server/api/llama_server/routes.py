"""`POST /completion` and `POST /infill`, as llama.cpp's clients call them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers
from typing_extensions import TypedDict

from server.api.answers import JsonAnswer, StreamAnswer
from server.api.dialect import Dialect
from server.api.llama_server import props
from server.api.llama_server.body import FILLS, InfillBody, LlamaCompletionBody
from server.api.llama_server.errors import ERRORS as ERROR_SHAPE
from server.api.llama_server.errors import LlamaErrorAnswer
from server.api.llama_server.writer import LlamaWriter
from server.api.prepare import generate_request, renamed
from server.api.routing import EVENT_STREAM, body_schema, errors_as, keyed, service_for
from server.api.schemas.parse import body_of
from server.api.schemas.requests import (
    Continuation,
    Drawing,
    JsonSchema,
    JsonSchemaFormat,
    Sampling,
)
from server.errors import InvalidRequest, invalid
from server.models.service import TOKEN_BYTES, Service

#: What fields of the engine are called here.
NAMES = {"max_tokens": "n_predict", "response_format": "json_schema"}


class LlamaAnswer(TypedDict):
    """The whole answer, or the last event; the others have ``stop`` false."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    generation_settings: dict[str, Any]
    has_new_line: bool
    truncated: Literal[False]
    stop_type: Literal["none", "eos", "limit", "word"]
    stopping_word: str
    timings: dict[str, float]


router = APIRouter()
_ERRORS = errors_as(LlamaErrorAnswer)


@router.post(
    "/completion",
    response_model=LlamaAnswer,
    responses=_ERRORS | EVENT_STREAM,
    openapi_extra=body_schema(LlamaCompletionBody),
)
async def llama_completion(request: Request) -> Response:
    """Continue a prompt: JSON, or server-sent events with stream."""
    body = await body_of(LlamaCompletionBody, request)
    service = service_for(request, body.model)
    return await _answer(request, service, body, body.prompt)


@router.post(
    "/infill",
    response_model=LlamaAnswer,
    responses=_ERRORS | EVENT_STREAM,
    openapi_extra=body_schema(InfillBody),
)
async def infill(request: Request) -> Response:
    """Fill in between two texts, where the model's vocabulary has the tokens for that."""
    body = await body_of(InfillBody, request)
    service = service_for(request, body.model)
    ids, encode = service.tokenizer.special_ids, service.tokenizer.encode_continuation
    marks = next((names for names in FILLS if all(name in ids for name in names)), None)
    if marks is None:
        raise invalid(
            "input_suffix", "is not supported: the model's vocabulary has no tokens to fill in"
        )
    before, behind, between = (ids[name] for name in marks)

    def filled() -> list[int]:
        prompt = [before, *encode(body.input_prefix), behind, *encode(body.input_suffix), between]
        return [*prompt, *encode(body.prompt)]

    return await _answer(request, service, body, await asyncio.to_thread(filled))


async def _answer(
    request: Request, service: Service, body: LlamaCompletionBody, prompt: str | Sequence[int]
) -> Response:
    wanted = keyed(request, Continuation.model_construct(model=body.model))
    id = f"llama-{secrets.token_hex(16)}"
    try:
        asked = await generate_request(
            service, id, request.state.owner, prompt, wanted, _sampling(body)
        )
    except InvalidRequest as error:
        raise renamed(error, NAMES) from None
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    writer = LlamaWriter(service, asked, stops, bool(body.return_tokens), time.monotonic)
    if body.stream:
        return StreamAnswer(service, asked, writer)
    num_bytes = 0 if asked.sampling is None else asked.sampling.max_tokens * TOKEN_BYTES
    service.large_answers.check(num_bytes, "n_predict", "n_predict")
    return JsonAnswer(service, asked, writer, num_bytes)


def _sampling(body: LlamaCompletionBody) -> Sampling:
    schema: JsonSchemaFormat | None = None
    if body.json_schema is not None:
        named = JsonSchema(name="schema", schema=body.json_schema, description=None)
        schema = JsonSchemaFormat(type="json_schema", json_schema=named)
    given: dict[str, Any] = {name: getattr(body, name) for name in Drawing.model_fields}
    return Sampling.model_construct(**given, max_tokens=body.n_predict, response_format=schema)


router.routes.extend(props.router.routes)
_PATHS = frozenset({"/completion", "/infill", "/props", "/slots", "/apply-template"})


def _owns(path: str, headers: Headers) -> bool:
    return path in _PATHS


DIALECT = Dialect(name="llama_server", router=router, owns=_owns, errors=ERROR_SHAPE)
