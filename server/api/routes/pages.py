"""The page at `/`, the API's description at `/docs`, and their files, with a strict policy."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from server.api.errors import RouteNotFound
from server.api.middleware.replies import refuse

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

router = APIRouter(include_in_schema=False)


@router.get("/")
async def index() -> Response:
    """The page."""
    return _page("index.html")


@router.get("/chat")
async def chat() -> Response:
    """The page for models that have a chat template."""
    return _page("chat.html")


@router.get("/docs")
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
