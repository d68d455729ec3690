"""States that sessions begin with: listed, kept, exported and deleted, with the scope ``admin``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel
from pydantic.json_schema import SkipJsonSchema

from server.api.routes.lookup import models_of, service_for
from server.api.schemas.names import ModelName, StateName
from server.api.schemas.openapi import ERRORS, answer_content, body_content
from server.api.schemas.queries import Query as StrictQuery
from server.api.streaming import json_response
from server.store.named_state import NamedState

router = APIRouter(prefix="/v1/admin/states")

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


@router.get("", response_model=StateList, responses=ERRORS)
async def list_states(request: Request) -> Response:
    """The states of every model."""
    data: list[dict[str, Any]] = [
        {"name": info.name, "model": name, "digest": info.digest, "fixed": info.fixed}
        for name, version in models_of(request).current.items()
        for info in await version.service.states.listed()
    ]
    return json_response({"object": "list", "data": data})


@router.post(
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


@router.get(
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


@router.delete("/{name}", response_model=StateDeleted, responses=ERRORS)
async def delete_state(
    request: Request, name: str, query: Annotated[StateQuery, Query()]
) -> Response:
    """Delete a state; sessions that have begun with it continue."""
    await service_for(request, query.model).states.delete(name)
    return json_response({"name": name, "deleted": True})
