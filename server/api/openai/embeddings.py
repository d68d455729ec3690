"""`POST /v1/embeddings`: the mean of the last hidden states, with the length 1.

The hidden states are those after the final norm, of all tokens that are fed, the
start token of a text included.
"""

from __future__ import annotations

import base64
import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import orjson
from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from server.api.answers import JsonAnswer, LastEventsWriter, ended
from server.api.openai.bodies import EmbeddingsBody, prompts_in
from server.api.openai.choices import written_list
from server.api.prepare import embedding_requests, unit_vector, vectors_bytes
from server.api.routing import ERRORS, body_schema, service_for
from server.api.schemas.parse import body_of
from server.engine.types import Event, Finished
from server.engine.types import Request as EngineRequest

router = APIRouter()


class EmbeddingAnswer(TypedDict):
    """A unit vector, or its numbers of 32 bits in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Tokens that were fed."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    """A vector for each input."""

    object: Literal["list"]
    data: list[EmbeddingAnswer]
    model: str
    usage: EmbeddingUsage


@router.post(
    "/v1/embeddings",
    response_model=Embeddings,
    responses=ERRORS,
    openapi_extra=body_schema(EmbeddingsBody),
)
async def embed(request: Request) -> Response:
    """A vector for each input."""
    body = await body_of(EmbeddingsBody, request)
    service = service_for(request, body.model)
    id, inputs = f"embd-{secrets.token_hex(16)}", prompts_in(body.input)
    requests = await embedding_requests(service, id, request.state.owner, inputs, "input")
    model, as_text = service.model.name, body.encoding_format == "base64"
    writer = LastEventsWriter(lambda lasts: _whole(lasts, requests, model, as_text))
    return JsonAnswer(service, requests, writer, vectors_bytes(service, requests))


def _whole(
    lasts: Mapping[str, Event], requests: Sequence[EngineRequest], model: str, as_text: bool
) -> Iterator[bytes]:
    """The answer, vector by vector."""
    ends = [ended(lasts[each.request_id]) for each in requests]
    num_tokens = sum(end.usage.prompt_tokens for end in ends)
    usage: EmbeddingUsage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    answer: Embeddings = {"object": "list", "data": [], "model": model, "usage": usage}
    vectors = (
        {"object": "embedding", "index": index, "embedding": _vector(end, as_text)}
        for index, end in enumerate(ends)
    )
    return written_list(answer, "data", map(orjson.dumps, vectors))


def _vector(end: Finished, as_text: bool) -> list[float] | str:
    """The unit vector; as text, little-endian numbers of 32 bits in base64."""
    unit = unit_vector(end)
    if not as_text:
        return unit
    return base64.b64encode(struct.pack(f"<{len(unit)}f", *unit)).decode()
