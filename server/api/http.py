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
from server.api.completion import CompletionWriter, appended_body
from server.api.errors import ModelNotFound, invalid
from server.api.schemas import AppendBody, CompletionBody, CreateSessionBody
from server.api.service import Service
from server.api.sse import JsonAnswer, SseAnswer
from server.api.translate import parse_body

router = APIRouter()

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": answers.ErrorAnswer} for status in (400, 401, 404, 409, 413, 429, 500, 503)
}


def body_schema(name: str) -> dict[str, Any]:
    """OpenAPI's description of a body that a route parses itself."""
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def service_of(request: Request) -> Service:
    """The service of the app that ``request`` came to."""
    service: Service = request.app.state.service
    return service


@router.post(
    "/v1/completions",
    response_model=answers.Completion,
    responses=ERRORS,
    openapi_extra=body_schema("CompletionBody"),
)
async def complete(request: Request) -> Response:
    """Generate text: JSON, or server-sent events with stream."""
    service = service_of(request)
    body = parse_body(CompletionBody, await request.body())
    if body.model is not None and body.model != service.model.name:
        raise ModelNotFound
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream to be true")
    work = await service.translator.generate(
        f"cmpl-{secrets.token_hex(16)}", request.state.owner, body, body
    )
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    writer = CompletionWriter(work, service.model.name, int(time.time()), include_usage)
    if body.stream:
        return SseAnswer(service.driver, work, writer.chunks, service.outbox_events)
    return JsonAnswer(service.driver, work, writer.whole, service.outbox_events)


@router.get("/v1/models", response_model=answers.ModelList)
async def models(request: Request) -> Response:
    """The model and its capacity."""
    details = asdict(service_of(request).model)
    name, created_s = details.pop("name"), details.pop("created_s")
    model = {"id": name, "object": "model", "created": created_s, "owned_by": "everstream"}
    return _json({"object": "list", "data": [{**model, "everstream": details}]})


@router.post(
    "/v1/sessions",
    response_model=answers.SessionCreated,
    responses=ERRORS,
    openapi_extra=body_schema("CreateSessionBody"),
)
async def create_session(request: Request) -> Response:
    """A kept, empty session."""
    parse_body(CreateSessionBody, await request.body() or b"{}")
    info = await service_of(request).driver.create_session(request.state.owner)
    return _json(
        {"session": info.session, "position": info.position, "state_bytes": info.state_bytes}
    )


@router.get(
    "/v1/sessions/{session}",
    response_model=answers.SessionAnswer,
    responses=ERRORS,
)
async def session_info(request: Request, session: str) -> Response:
    """Position, idle seconds and bytes of a session."""
    info = await service_of(request).driver.session_info(session, request.state.owner)
    return _json(asdict(info))


@router.delete(
    "/v1/sessions/{session}",
    response_model=answers.SessionDeleted,
    responses=ERRORS,
)
async def delete_session(request: Request, session: str) -> Response:
    """Free a session's slot."""
    await service_of(request).driver.delete_session(session, request.state.owner)
    return _json({"session": session, "deleted": True})


@router.post(
    "/v1/sessions/{session}/append",
    response_model=answers.Appended,
    responses=ERRORS,
    openapi_extra=body_schema("AppendBody"),
)
async def append(request: Request, session: str) -> Response:
    """Feed text to a session without generating."""
    service = service_of(request)
    body = parse_body(AppendBody, await request.body())
    request_id = f"app-{secrets.token_hex(16)}"
    work = await service.translator.append(request_id, request.state.owner, session, body)
    return JsonAnswer(service.driver, work, appended_body, service.outbox_events)


@router.get("/health", response_model=answers.Health)
async def health(request: Request) -> Response:
    """Whether the engine is alive."""
    healthy = service_of(request).driver.healthy
    return _json({"status": "ok" if healthy else "failed"}, 200 if healthy else 503)


@router.get("/ready", response_model=answers.Health)
async def ready(request: Request) -> Response:
    """Whether new work is accepted."""
    accepting = service_of(request).driver.ready
    return _json({"status": "ready" if accepting else "not ready"}, 200 if accepting else 503)


@router.get("/metrics", response_class=Response)
async def prometheus(request: Request) -> Response:
    """Metrics for Prometheus."""
    driver = service_of(request).driver
    body = driver.metrics.render(await driver.stats())
    return Response(body, headers={"content-type": metrics.CONTENT_TYPE})


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
