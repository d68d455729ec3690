"""Routes for the operator, for keys with the scope ``admin``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from server.api.answers import json_response
from server.api.auth import Keyring, Limits, Tenant
from server.api.routing import (
    ERRORS,
    KEY_ERRORS,
    answer_content,
    body_content,
    body_schema,
    models_of,
    service_for,
)
from server.api.schemas.parse import body_of
from server.api.schemas.wire import ModelName, StateName, Wire
from server.api.schemas.wire import Query as StrictQuery
from server.store.states import NamedState

router = APIRouter(responses=KEY_ERRORS)


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


@router.get("/v1/admin/tenants", response_model=TenantList)
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


@router.post(
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
