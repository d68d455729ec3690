"""`POST /v1/score`: how likely continuations are after a context that is computed once.

A text is tokenized by itself: the boundary is where the texts meet, and a space
belongs to the text that has it. Token ids are taken as they are.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from server.api.answers import JsonAnswer, LastEventsWriter, ended, total_usage, usage_object
from server.api.openai.bodies import ScoreBody
from server.api.openai.choices import BLOCK_TOKENS, JsonList, Top, finite, written_list
from server.api.prepare import prompt_tokens
from server.api.routing import ERRORS, body_schema, service_for
from server.api.schemas.parse import body_of
from server.api.schemas.responses import UsageAnswer
from server.engine.text import TokenArray
from server.engine.types import Event, Finished
from server.engine.types import Request as EngineRequest
from server.errors import InternalFailure, invalid
from server.models.service import LOGPROB_BYTES, Service

router = APIRouter()


class ScoreAnswer(TypedDict):
    """How likely a continuation is; ``top_logprobs`` has pairs of an id and its value."""

    object: Literal["score"]
    index: int
    logprob: float
    num_tokens: int
    is_greedy: bool
    tokens: list[int]
    token_logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]] | None


class Scores(TypedDict):
    """How likely each continuation is."""

    id: str
    object: Literal["list"]
    model: str
    data: list[ScoreAnswer]
    usage: UsageAnswer


@router.post(
    "/v1/score",
    response_model=Scores,
    responses=ERRORS,
    openapi_extra=body_schema(ScoreBody),
)
async def score(request: Request) -> Response:
    """The log-likelihood of each continuation of one context."""
    body = await body_of(ScoreBody, request)
    service = service_for(request, body.model)
    engine_request = await _engine_request(service, body, request.state.owner)
    model, num_top = service.model.name, body.top
    num_tokens = sum(map(len, engine_request.continuations))
    num_bytes = num_tokens * (1 + (num_top or 0)) * LOGPROB_BYTES
    service.large_answers.check(num_bytes, "top", "the continuations and top")
    writer = LastEventsWriter(lambda lasts: _whole(lasts, engine_request, model, num_top))
    return JsonAnswer(service, engine_request, writer, num_bytes)


async def _engine_request(service: Service, body: ScoreBody, owner: str) -> EngineRequest:
    """One request: an empty context is the start token."""
    context = await prompt_tokens(service, owner, body.prompt, "prompt")
    if not context and not isinstance(body.prompt, str):
        raise invalid("prompt", 'must have a token; the text "" is the start token')
    continuations = []
    for one in body.continuations:
        tokens = await prompt_tokens(service, owner, one, "continuations", bool(context))
        continuations.append(tokens)
        await asyncio.sleep(0)  # others have their turn between them
    if not all(continuations):
        raise invalid("continuations", "must not be empty")
    service.limits.check_prompt(sum(map(len, continuations)), "continuations", " together")
    return EngineRequest(
        f"score-{secrets.token_hex(16)}",
        owner,
        context or TokenArray((service.model.bos_token_id,)),
        sampling=None,
        start=isinstance(body.prompt, str) and bool(context),
        num_top=max(1, body.top or 0),
        continuations=tuple(continuations),
    )


def _whole(
    lasts: Mapping[str, Event], engine_request: EngineRequest, model: str, num_top: int | None
) -> Iterator[bytes]:
    """The answer, continuation by continuation."""
    ends = [ended(lasts[id]) for id in engine_request.ids]
    answer: Scores = {
        "id": engine_request.request_id,
        "object": "list",
        "model": model,
        "data": [],
        "usage": usage_object(total_usage(ends)),
    }
    return written_list(answer, "data", _written(engine_request, ends, num_top))


def _written(
    engine_request: EngineRequest, ends: Sequence[Finished], num_top: int | None
) -> Iterator[bytes]:
    for index, (tokens, end) in enumerate(zip(engine_request.continuations, ends, strict=True)):
        yield orjson.dumps((yield from _scored(index, tokens, end, num_top)))


def _scored(
    index: int, tokens: Sequence[int], end: Finished, num_top: int | None
) -> Generator[bytes, None, dict[str, Any]]:
    """One continuation's. It is greedy where each of its tokens is the most probable one."""
    if end.logprobs is None or end.tops is None:
        raise InternalFailure("the request was cancelled")
    pairs = zip(end.logprobs, end.tops, strict=True)
    tops = None if num_top is None else (yield from _tops(end.tops, num_top))
    return {
        "object": "score",
        "index": index,
        "logprob": finite(math.fsum(end.logprobs)),
        "num_tokens": len(tokens),
        "is_greedy": all(logprob == top[0][1] for logprob, top in pairs),
        "tokens": [*tokens],
        "token_logprobs": [finite(value) for value in end.logprobs],
        "top_logprobs": tops,
    }


def _tops(tops: Sequence[Top], num_top: int) -> Generator[bytes, None, orjson.Fragment]:
    """The most probable tokens in each place; others have their turn between blocks."""
    written = JsonList()
    for index, top in enumerate(tops):
        written.add([[[id, finite(value)] for id, value in top[:num_top]]])
        if index % BLOCK_TOKENS == 0:
            yield b""
    return written.json()
