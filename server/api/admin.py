"""Routes for the operator, for keys with the scope ``admin``."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from server.api.keyring import Keyring
from server.api.keys_file import Limits
from server.api.tenants import Tenant

router = APIRouter()


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
    return Response(orjson.dumps(answer), media_type="application/json")


def _usage(tenant: Tenant) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "limits": tenant.limits.model_dump(),
        "connections": tenant.num_connections,
        "requests_total": tenant.requests_total,
        "refused_total": tenant.refused_total,
        "tokens_total": tenant.tokens_total,
    }
