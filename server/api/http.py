"""The HTTP routes. Each parses bytes, translates, asks the driver, and answers."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from server import metrics
from server.api import answers
from server.api.completion import CompletionWriter
from server.api.describe import (
    ERRORS,
    EVENT_STREAM,
    KEY_ERRORS,
    OPEN_ERRORS,
    Responses,
    answer_content,
    body_schema,
)
from server.api.errors import invalid
from server.api.lookup import service_for, service_of
from server.api.schemas import CompletionBody
from server.api.sse import JsonAnswer, SseAnswer
from server.api.translate import Choices, parse_body

router = APIRouter()

_UNHEALTHY: Responses = {503: {"model": answers.Health}}
_OPEN: dict[str, Any] = {"security": []}


@router.post(
    "/v1/completions",
    response_model=answers.Completion,
    responses=ERRORS | EVENT_STREAM,
    openapi_extra=body_schema(CompletionBody),
)
async def complete(request: Request) -> Response:
    """Generate text: JSON, or server-sent events with stream."""
    body = parse_body(CompletionBody, await request.body())
    service = service_for(request, body.model)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream to be true")
    if body.session is not None or body.keep:
        request.state.caller.require("sessions")
    work = await service.translator.generate(
        f"cmpl-{secrets.token_hex(16)}", request.state.owner, body, body, _choices(body)
    )
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    epoch = service.driver.epoch_name(0).removesuffix("-0")
    created_s = int(time.time())
    writer = CompletionWriter(
        work, service.model.name, created_s, epoch, include_usage, body.n or 1
    )
    if body.stream:
        return SseAnswer(service, work, writer)
    return JsonAnswer(service, work, writer.whole)


def _choices(body: CompletionBody) -> Choices:
    """What is drawn; raises `InvalidRequest` where that cannot be."""
    num_shown, num_drawn = body.n or 1, body.best_of or body.n or 1
    if num_drawn < num_shown:
        raise invalid("best_of", "must be at least n")
    if num_drawn > num_shown and body.stream:
        raise invalid("best_of", "cannot be streamed: all must end before the best are known")
    return Choices(num_drawn, ranked=num_drawn > num_shown)


@router.get("/v1/models", response_model=answers.ModelList, responses=KEY_ERRORS)
async def models(request: Request) -> Response:
    """The model and its capacity."""
    details = asdict(service_of(request).model)
    name, created_s = details.pop("name"), details.pop("created_s")
    model = {"id": name, "object": "model", "created": created_s, "owned_by": "everstream"}
    return json_answer({"object": "list", "data": [{**model, "everstream": details}]})


@router.get(
    "/health",
    response_model=answers.Health,
    responses=OPEN_ERRORS | _UNHEALTHY,
    openapi_extra=_OPEN,
)
async def health(request: Request) -> Response:
    """Whether the engine is alive."""
    healthy = service_of(request).driver.healthy
    return json_answer({"status": "ok" if healthy else "failed"}, 200 if healthy else 503)


@router.get(
    "/ready",
    response_model=answers.Health,
    responses=OPEN_ERRORS | _UNHEALTHY,
    openapi_extra=_OPEN,
)
async def ready(request: Request) -> Response:
    """Whether new work is accepted."""
    accepting = service_of(request).driver.ready
    return json_answer({"status": "ready" if accepting else "not ready"}, 200 if accepting else 503)


@router.get(
    "/metrics",
    response_class=Response,
    responses=KEY_ERRORS | answer_content("text/plain", type="string"),
)
async def prometheus(request: Request) -> Response:
    """Metrics for Prometheus."""
    driver = service_of(request).driver
    body = driver.metrics.render(await driver.stats())
    return Response(body, headers={"content-type": metrics.CONTENT_TYPE})


def json_answer(value: object, status: int = 200) -> Response:
    """``value`` as the body of an answer."""
    return Response(orjson.dumps(value), status, media_type="application/json")
