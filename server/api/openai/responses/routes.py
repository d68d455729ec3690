"""`/v1/responses`: OpenAI's Responses API on kept sessions.

A response is what one request has generated in a session of its own. Its name is
the key under which the store finds the request, so that what is read again comes
from the log: after a lost connection, a crash or a restart as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from server.api.events import number_of
from server.api.openai.responses import answers_schema as answers
from server.api.openai.responses.answers import NewResponse, ReplayedResponse, in_background
from server.api.openai.responses.note import Json
from server.api.openai.responses.preparing import (
    needs_sessions,
    prepare,
    response_of_key,
    stored_previous,
)
from server.api.openai.responses.reading import ResponseNotFound, StoredResponse, find
from server.api.openai.responses.schemas import Includes, ResponsesBody
from server.api.routes.lookup import models_of, service_for
from server.api.schemas.names import Label
from server.api.schemas.openapi import ERRORS, EVENT_STREAM, NO_MORE_EVENTS, body_schema
from server.api.schemas.parse import body_of
from server.api.schemas.queries import Flag, Seq
from server.api.schemas.queries import Query as StrictQuery
from server.api.streaming import LargeResponse, json_response
from server.errors import invalid
from server.models.service import Service

router = APIRouter(prefix="/v1/responses")


class RetrieveQuery(StrictQuery):
    """`GET /v1/responses/{id}`: with ``stream``, the events after number ``starting_after``."""

    stream: Flag = False
    starting_after: Seq | SkipJsonSchema[None] = None
    include_obfuscation: Literal["false"] | SkipJsonSchema[None] = None
    include: Includes | SkipJsonSchema[None] = Field(None, alias="include[]")


class InputItemsQuery(StrictQuery):
    """`GET /v1/responses/{id}/input_items`: those after the one called ``after``."""

    after: Label | SkipJsonSchema[None] = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    include: Includes | SkipJsonSchema[None] = Field(None, alias="include[]")


@router.post(
    "",
    response_model=answers.ResponseObject,
    responses=ERRORS | EVENT_STREAM,
    openapi_extra=body_schema(ResponsesBody),
)
async def create_response(request: Request) -> Response:
    """Generate an answer: JSON, server-sent events with stream, or later with background."""
    body = await body_of(ResponsesBody, request)
    owner = request.state.owner
    service = await _service_for(request, body)
    if needs_sessions(body):
        request.state.caller.require("sessions")
    if (done := await _done_before(service, owner, body)) is not None:
        if body.background and not body.stream:
            return LargeResponse(await done.response(), media_type="application/json")
        return ReplayedResponse(done, bool(body.stream))
    prepared = await prepare(service, owner, body, stored_previous(service, owner))
    if body.background and not body.stream:
        return Response(await in_background(prepared), media_type="application/json")
    return NewResponse(prepared, bool(body.stream))


@router.get(
    "/{response_id}",
    response_model=answers.ResponseObject,
    responses=ERRORS | EVENT_STREAM | NO_MORE_EVENTS,
)
async def retrieve_response(
    request: Request,
    response_id: str,
    query: Annotated[RetrieveQuery, Query()],
    last_event_id: Annotated[str | SkipJsonSchema[None], Header()] = None,
) -> Response:
    """A response as it is now, or its events, those to come included."""
    if query.starting_after is not None and not query.stream:
        raise invalid("starting_after", "needs stream to be true")
    kept = await _find(request, response_id)
    if query.stream:
        if last_event_id:  # of an `EventSource` that comes back
            after = number_of(last_event_id)
            if await kept.has_all(after):
                return Response(status_code=204, headers={"cache-control": "no-store"})
        else:
            after = -1 if query.starting_after is None else query.starting_after
        return ReplayedResponse(kept, True, after)
    if kept.keyed.finished is None:  # where the server does not begin again by itself
        await kept.service.sessions.continue_unattended(kept.keyed.session, kept.owner)
    return LargeResponse(await kept.response(), media_type="application/json")


@router.post(
    "/{response_id}/cancel",
    response_model=answers.ResponseObject,
    responses=ERRORS,
)
async def cancel_response(request: Request, response_id: str) -> Response:
    """End a response; one that has ended stays as it is."""
    kept = await _find(request, response_id)
    if kept.keyed.finished is None:
        sessions, session = kept.service.sessions, kept.keyed.session
        await sessions.cancel(session, kept.owner)
        await sessions.info(session, kept.owner)  # the step that ends it comes before the answer
    return LargeResponse(await kept.response(), media_type="application/json")


@router.delete("/{response_id}", response_model=answers.ResponseDeleted, responses=ERRORS)
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a response and its session; those that continue from it stay."""
    kept = await _find(request, response_id)
    await kept.service.sessions.delete(kept.keyed.session, kept.owner)
    deleted: answers.ResponseDeleted = {"id": response_id, "object": "response", "deleted": True}
    return json_response(deleted)


@router.get(
    "/{response_id}/input_items",
    response_model=answers.InputItemList,
    responses=ERRORS,
)
async def input_items(
    request: Request, response_id: str, query: Annotated[InputItemsQuery, Query()]
) -> Response:
    """What a response was asked, without what came before it."""
    kept = await _find(request, response_id)
    items = kept.note.items if query.order == "asc" else kept.note.items[::-1]
    if query.after is not None:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise invalid("after", "is not an item of this response")
        items = items[ids.index(query.after) + 1 :]
    return json_response(_page(items, query.limit))


def _page(items: list[Json], limit: int) -> answers.InputItemList:
    shown = items[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > limit,
    }


async def _done_before(service: Service, owner: str, body: ResponsesBody) -> StoredResponse | None:
    """What was done under the body's key, if anything."""
    if body.idempotency_key is None:
        return None
    try:
        return await find([service], owner, response_of_key(service, owner, body.idempotency_key))
    except ResponseNotFound:
        return None


async def _service_for(request: Request, body: ResponsesBody) -> Service:
    """That of the body's model; where it names none, of the response that it continues from."""
    if body.model is None and body.previous_response_id is not None:
        with suppress(ResponseNotFound):
            return (await _find(request, body.previous_response_id)).service
    return service_for(request, body.model)


async def _find(request: Request, id: str) -> StoredResponse:
    """The response, whose model is held until the request is answered."""
    services: Iterable[Service] = [each.service for each in models_of(request).versions]
    kept = await find(services, request.state.owner, id)
    request.state.held.enter_context(kept.service.async_engine.use())
    return kept
