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
from server.api.errors import ModelNotFound, invalid
from server.api.schemas import CompletionBody
from server.api.service import Service
from server.api.sse import JsonAnswer, SseAnswer
from server.api.translate import Choices, parse_body

router = APIRouter()

Responses = dict[int | str, dict[str, Any]]

_RETRY_AFTER = {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}}
_HEADERS = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}},
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
    507: _RETRY_AFTER,
}


def _errors(*statuses: int) -> Responses:
    return {
        status: {"model": answers.ErrorAnswer, "headers": _HEADERS.get(status, {})}
        for status in statuses
    }


#: OpenAPI's description of what may go wrong on every route, on those that want a key, and in work.
OPEN_ERRORS = _errors(400, 413, 431, 500)
KEY_ERRORS = OPEN_ERRORS | _errors(401, 403, 429, 503)
ERRORS = KEY_ERRORS | _errors(404, 408, 409, 410, 507)

_UNHEALTHY: Responses = {503: {"model": answers.Health}}
_OPEN: dict[str, Any] = {"security": []}


def body_schema(name: str, required: bool = True) -> dict[str, Any]:
    """OpenAPI's description of a body that a route parses itself."""
    return body_content("application/json", {"$ref": f"#/components/schemas/{name}"}, required)


def body_content(media_type: str, schema: dict[str, Any], required: bool = True) -> dict[str, Any]:
    """OpenAPI's description of a body of any type."""
    return {"requestBody": {"required": required, "content": {media_type: {"schema": schema}}}}


def answer_content(media_type: str, **schema: str) -> Responses:
    """OpenAPI's description of an answer that is not JSON."""
    return {200: {"content": {media_type: {"schema": schema} if schema else {}}}}


EVENT_STREAM = answer_content("text/event-stream")


def service_of(request: Request) -> Service:
    """The service of the app that ``request`` came to."""
    service: Service = request.app.state.service
    return service


@router.post(
    "/v1/completions",
    response_model=answers.Completion,
    responses=ERRORS | EVENT_STREAM,
    openapi_extra=body_schema("CompletionBody"),
)
async def complete(request: Request) -> Response:
    """Generate text: JSON, or server-sent events with stream."""
    service = service_of(request)
    body = parse_body(CompletionBody, await request.body(), service.translator.max_ids)
    if body.model is not None and body.model != service.model.name:
        raise ModelNotFound
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
