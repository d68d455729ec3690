"""The HTTP routes of the server itself: its health, its metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.routes.lookup import models_of
from server.api.schemas import responses as answers
from server.api.schemas.openapi import KEY_ERRORS, OPEN_ERRORS, Responses, answer_content
from server.api.streaming import json_response
from server.api.websocket.socket import Sockets
from server.observability import metrics

router = APIRouter()

_UNHEALTHY: Responses = {503: {"model": answers.Health}}
_OPEN: dict[str, Any] = {"security": []}


@router.get(
    "/health",
    response_model=answers.Health,
    responses=OPEN_ERRORS | _UNHEALTHY,
    openapi_extra=_OPEN,
)
async def health(request: Request) -> Response:
    """Whether every engine is alive."""
    healthy = models_of(request).healthy
    return json_response({"status": "ok" if healthy else "failed"}, 200 if healthy else 503)


@router.get(
    "/ready",
    response_model=answers.Health,
    responses=OPEN_ERRORS | _UNHEALTHY,
    openapi_extra=_OPEN,
)
async def ready(request: Request) -> Response:
    """Whether every model takes new work."""
    accepting = models_of(request).ready
    return json_response(
        {"status": "ready" if accepting else "not ready"}, 200 if accepting else 503
    )


@router.get(
    "/metrics",
    response_class=Response,
    responses=KEY_ERRORS | answer_content("text/plain", type="string"),
)
async def prometheus(request: Request) -> Response:
    """Metrics for Prometheus."""
    sockets: Sockets = request.app.state.sockets
    body = metrics.render(await models_of(request).scrapes(), len(sockets))
    return Response(body, headers={"content-type": metrics.CONTENT_TYPE})
