"""`POST /v1/score`: how likely continuations are after a context that is computed once.

A text is tokenized by itself: the boundary is where the texts meet, and a space
belongs to the text that has it. Token ids are taken as they are.
"""

from __future__ import annotations

import math
import secrets
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from server.api import answers
from server.api.completion import ended, total_usage
from server.api.describe import ERRORS, body_schema
from server.api.errors import invalid
from server.api.lookup import service_for
from server.api.openai.bodies import ScoreBody
from server.api.openai.logprobs import finite
from server.api.service import Service
from server.api.sse import JsonAnswer
from server.api.translate import parse_body, usage_object
from server.engine.errors import InternalFailure
from server.engine.types import Event, Finished
from server.engine.types import Request as Work

router = APIRouter()


@router.post(
    "/v1/score",
    response_model=answers.Scores,
    responses=ERRORS,
    openapi_extra=body_schema(ScoreBody),
)
async def score(request: Request) -> Response:
    """The log-likelihood of each continuation of one context."""
    body = parse_body(ScoreBody, await request.body())
    service = service_for(request, body.model)
    work = await _work(service, body, request.state.owner)
    model, num_top = service.model.name, body.top
    return JsonAnswer(service, work, lambda events: _whole(events, work, model, num_top))


async def _work(service: Service, body: ScoreBody, owner: str) -> Work:
    """One request: an empty context is the start token."""
    translator, model = service.translator, service.model
    context = await translator.tokens(body.prompt, "prompt")
    if not context and not isinstance(body.prompt, str):
        raise invalid("prompt", 'must have a token; the text "" is the start token')
    continuations = [await translator.tokens(one, "continuations") for one in body.continuations]
    if not all(continuations):
        raise invalid("continuations", "must not be empty")
    if sum(map(len, continuations)) > translator.max_ids:
        raise invalid("continuations", f"must have at most {translator.max_ids} tokens together")
    return Work(
        f"score-{secrets.token_hex(16)}",
        owner,
        context or (model.bos_token_id,),
        sampling=None,
        start=isinstance(body.prompt, str) and bool(context),
        num_top=max(1, body.top or 0),
        continuations=tuple(continuations),
    )


def _whole(events: list[Event], work: Work, model: str, num_top: int | None) -> bytes:
    """The answer; raises the `EngineError` that the request ended by."""
    last = {event.request_id: event for event in events}
    ends = [ended([last[id]]) for id in work.ids]
    return orjson.dumps(
        {
            "id": work.request_id,
            "object": "list",
            "model": model,
            "data": [
                _scored(index, tokens, end, num_top)
                for index, (tokens, end) in enumerate(zip(work.continuations, ends, strict=True))
            ],
            "usage": usage_object(total_usage(ends)),
        }
    )


def _scored(
    index: int, tokens: tuple[int, ...], end: Finished, num_top: int | None
) -> dict[str, Any]:
    """One continuation's. It is greedy where each of its tokens is the most probable one."""
    if end.logprobs is None or end.tops is None:
        raise InternalFailure("the request was cancelled")
    pairs = zip(end.logprobs, end.tops, strict=True)
    tops = [[[id, finite(value)] for id, value in top[:num_top]] for top in end.tops]
    return {
        "object": "score",
        "index": index,
        "logprob": finite(math.fsum(end.logprobs)),
        "num_tokens": len(tokens),
        "is_greedy": all(logprob == top[0][1] for logprob, top in pairs),
        "tokens": tokens,
        "token_logprobs": [finite(value) for value in end.logprobs],
        "top_logprobs": None if num_top is None else tops,
    }
