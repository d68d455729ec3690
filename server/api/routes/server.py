"""The routes of the server itself: its health, its metrics, its page and its descriptions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from server.api.answers import json_response
from server.api.errors import RouteNotFound
from server.api.gate import refuse
from server.api.routing import KEY_ERRORS, OPEN_ERRORS, Responses, answer_content, models_of
from server.api.schemas import responses as answers
from server.api.sockets import Sockets
from server.observability import metrics

# -------------------------------------------------------------------------------------------------
# The HTTP routes of the server itself: its health, its metrics.


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


# -------------------------------------------------------------------------------------------------
# The page at `/`, the API's description at `/docs`, and their files, with a strict policy.


STATIC = Path(__file__).parents[1] / "static"
#: The JavaScript client, which the page uses as any other page would.
CLIENT = Path(__file__).parents[3] / "clients" / "javascript"
CLIENT_PREFIX = "client/"

PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "accept-ranges": "none",
}

pages_router = APIRouter(include_in_schema=False)


@pages_router.get("/")
async def index() -> Response:
    """The page."""
    return _page("index.html")


@pages_router.get("/chat")
async def chat() -> Response:
    """The page for models that have a chat template."""
    return _page("chat.html")


@pages_router.get("/docs")
async def docs() -> Response:
    """The API's description, rendered from `/openapi.json`."""
    return _page("docs.html")


class PageFiles(StaticFiles):
    """Static files under the page's policy, and the client's modules below ``client/``."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await refuse(scope, receive, send, RouteNotFound())
        else:
            await super().__call__(_whole(scope), receive, send)

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        if not path.startswith(CLIENT_PREFIX):
            return super().lookup_path(path)
        found = CLIENT / path.removeprefix(CLIENT_PREFIX)
        # Modules alone: neither what was installed for their tests nor anything elsewhere.
        if found.parent != CLIENT or found.suffix != ".js" or not found.is_file():
            return "", None
        return str(found), found.stat()

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


def _page(name: str) -> Response:
    path = STATIC / name
    if not path.is_file():
        raise RouteNotFound
    return HtmlPage(path, headers=PAGE_HEADERS)


class HtmlPage(FileResponse):
    """A file as a whole."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(_whole(scope), receive, send)


def _whole(scope: Scope) -> Scope:
    """Without a range: it need not be honoured, and a bad one is refused in plain text."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
    return {**scope, "headers": headers}
