"""The page at `/`, the API's description at `/docs`, and their files, with a strict policy."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from server.api.errors import RouteNotFound

STATIC = Path(__file__).parent.parent / "static"

PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; connect-src 'self' ws: wss:; "
    "img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def index() -> Response:
    """The page."""
    return _page("index.html")


@router.get("/docs")
async def docs() -> Response:
    """The API's description, rendered from `/openapi.json`."""
    return _page("docs.html")


class PageFiles(StaticFiles):
    """Static files under the page's policy."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


def _page(name: str) -> Response:
    path = STATIC / name
    if not path.is_file():
        raise RouteNotFound
    return FileResponse(path, headers=PAGE_HEADERS)
