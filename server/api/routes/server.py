"""The routes of the server itself: health, metrics, pages and descriptions; its operator's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from server.api.answers import json_response
from server.api.auth import Keyring, Limits, Tenant
from server.api.connections import Sockets
from server.api.errors import RouteNotFound
from server.api.gate import refuse
from server.api.routing import (
    ERRORS,
    KEY_ERRORS,
    OPEN_ERRORS,
    Responses,
    answer_content,
    body_content,
    body_schema,
    models_of,
    service_for,
)
from server.api.schemas import responses as answers
from server.api.schemas.wire import ModelName, StateName, Wire, body_of
from server.api.schemas.wire import Query as StrictQuery
from server.observability import metrics
from server.store.states import NamedState

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


# -------------------------------------------------------------------------------------------------
# For keys with the scope ``admin``: tenants, sessions that shall leave, named states.

admin_router = APIRouter(responses=KEY_ERRORS)


class TenantUsage(BaseModel):
    """A tenant at this moment. Totals count since the start of the process."""

    name: str
    limits: Limits
    connections: int
    requests_total: int
    refused_total: int
    tokens_total: int


class TenantList(BaseModel):
    """The answer to `GET /v1/admin/tenants`."""

    object: str
    data: list[TenantUsage]


@admin_router.get("/v1/admin/tenants", response_model=TenantList)
async def tenants(request: Request) -> Response:
    """What each tenant may use and uses; wants the scope admin."""
    keyring: Keyring = request.app.state.keyring
    data = [_usage(tenant) for _, tenant in sorted(keyring.tenants.items())]
    answer = {"object": "list", "data": data}
    return json_response(answer)


class RebalanceBody(Wire):
    """`POST /v1/admin/rebalance`."""

    sessions: int = Field(ge=1, le=1_000_000)


class Rebalanced(BaseModel):
    """How many sessions have left this process."""

    moved: int


@admin_router.post(
    "/v1/admin/rebalance",
    response_model=Rebalanced,
    responses=ERRORS,
    openapi_extra=body_schema(RebalanceBody),
)
async def rebalance(request: Request) -> Response:
    """Release kept sessions, those that run first; their readers are redirected elsewhere.

    What a client connects to next is the balancer's choice.
    """
    body = await body_of(RebalanceBody, request)
    moved = await models_of(request).rebalance(body.sessions)
    return json_response({"moved": moved})


def _usage(tenant: Tenant) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "limits": tenant.limits.model_dump(),
        "connections": tenant.num_connections,
        "requests_total": tenant.requests_total,
        "refused_total": tenant.refused_total,
        "tokens_total": tenant.tokens_total,
    }


# -------------------------------------------------------------------------------------------------
# States that sessions begin with: listed, kept, exported and deleted, with the scope ``admin``.


states_router = APIRouter(prefix="/v1/admin/states")

STATE_TYPE = "application/vnd.everstream.state"
STATE_SCHEMA = {"type": "string", "format": "binary"}


class StateQuery(StrictQuery):
    """Of ``model``, or of the default one."""

    model: ModelName | SkipJsonSchema[None] = None


class PutStateQuery(StateQuery):
    """`POST /v1/admin/states`: the file in the body is kept as the state ``name``."""

    name: StateName


class StateEntry(BaseModel):
    """A state of a model. One that is ``fixed`` was given at start."""

    name: str
    model: str
    digest: str
    fixed: bool


class StateList(BaseModel):
    """The answer to `GET /v1/admin/states`."""

    object: Literal["list"]
    data: list[StateEntry]


class StateKept(BaseModel):
    """A state that was given just now; ``tokens`` of text come before a session's own."""

    name: str
    model: str
    digest: str
    tokens: int


class StateDeleted(BaseModel):
    """A state that no new session begins with."""

    name: str
    deleted: Literal[True]


@states_router.get("", response_model=StateList, responses=ERRORS)
async def list_states(request: Request) -> Response:
    """The states of every model."""
    data: list[dict[str, Any]] = [
        {"name": info.name, "model": name, "digest": info.digest, "fixed": info.fixed}
        for name, version in models_of(request).current.items()
        for info in await version.service.states.listed()
    ]
    return json_response({"object": "list", "data": data})


@states_router.post(
    "",
    response_model=StateKept,
    responses=ERRORS,
    openapi_extra=body_content(STATE_TYPE, STATE_SCHEMA),
)
async def put_state(request: Request, query: Annotated[PutStateQuery, Query()]) -> Response:
    """Keep a state from a file: one of ours, a session's export, or a tuned one."""
    service = service_for(request, query.model)
    state: NamedState = await service.states.put(query.name, await request.body())
    return json_response(
        {
            "name": query.name,
            "model": service.model.name,
            "digest": state.digest,
            "tokens": state.num_tokens,
        }
    )


@states_router.get(
    "/{name}",
    response_class=Response,
    responses=ERRORS | answer_content(STATE_TYPE, **STATE_SCHEMA),
)
async def export_state(
    request: Request, name: str, query: Annotated[StateQuery, Query()]
) -> Response:
    """A state as a file."""
    data = await service_for(request, query.model).states.export(name)
    return Response(data, media_type=STATE_TYPE)


@states_router.delete("/{name}", response_model=StateDeleted, responses=ERRORS)
async def delete_state(
    request: Request, name: str, query: Annotated[StateQuery, Query()]
) -> Response:
    """Delete a state; sessions that have begun with it continue."""
    await service_for(request, query.model).states.delete(name)
    return json_response({"name": name, "deleted": True})
