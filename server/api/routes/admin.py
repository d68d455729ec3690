"""Routes for the operator, for keys with the scope ``admin``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from server.api.auth.keyring import Keyring
from server.api.auth.keys_file import Limits
from server.api.auth.tenants import Tenant
from server.api.routes.lookup import models_of
from server.api.schemas.openapi import ERRORS, KEY_ERRORS, body_schema
from server.api.schemas.parse import body_of
from server.api.schemas.wire import Wire
from server.api.streaming import json_response

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
