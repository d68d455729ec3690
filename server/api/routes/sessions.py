"""The routes of kept sessions: made, fed, forked, rewound, read again, moved."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic.json_schema import SkipJsonSchema

from server.api.answers import JsonAnswer, LastEventsWriter, appended_body, json_response
from server.api.events import EventsAnswer, created, cursor_of, forked
from server.api.prepare import append_request
from server.api.routing import (
    ERRORS,
    EVENT_STREAM,
    NO_MORE_EVENTS,
    answer_content,
    body_content,
    body_schema,
    keyed,
    models_of,
    service_for,
    service_with,
)
from server.api.schemas import responses as answers
from server.api.schemas.requests import AppendBody, CreateSessionBody, ForkBody, RewindBody
from server.api.schemas.wire import EventsQuery, ListQuery, TextQuery, body_of
from server.engine.types import SessionInfo
from server.models.service import Service
from server.sessions.log_text import read_text
from server.store.base import ImportRefused, Listed, SnapshotMismatch

router = APIRouter(prefix="/v1/sessions")

STATE_TYPE = "application/vnd.everstream.session"
STATE_SCHEMA = {"type": "string", "format": "binary"}


def session_object(service: Service, info: SessionInfo) -> dict[str, Any]:
    """A session as its owner sees it."""
    names = {"model": service.model.name, "epoch": service.async_engine.epoch_name(info.epoch)}
    return asdict(info) | names


@router.post(
    "",
    response_model=answers.SessionCreated,
    responses=ERRORS,
    openapi_extra=body_schema(CreateSessionBody, required=False),
)
async def create_session(request: Request) -> Response:
    """A kept session, empty or with a named state."""
    body = await body_of(CreateSessionBody, request, b"{}")
    service = service_for(request, body.model)
    info = await service.sessions.create(request.state.owner, body.state)
    return json_response(created(info, service.async_engine.epoch_name))


@router.get("", response_model=answers.SessionList, responses=ERRORS)
async def list_sessions(request: Request, query: Annotated[ListQuery, Query()]) -> Response:
    """The caller's sessions of all models by id, those that sleep too."""
    owner, after, limit = request.state.owner, query.after, query.limit
    found = [
        (one, version.service)
        for version in models_of(request).versions
        for one in await version.service.sessions.listed(owner, after, limit + 1)
    ]
    found.sort(key=lambda pair: pair[0].id)
    data = [_listed(service, one) for one, service in found[:limit]]
    return json_response({"object": "list", "data": data, "has_more": len(found) > limit})


@router.get("/{session}", response_model=answers.SessionAnswer, responses=ERRORS)
async def session_info(request: Request, session: str) -> Response:
    """Position, idle seconds and bytes of a session."""
    service = await service_with(request, session)
    info = await service.sessions.info(session, request.state.owner)
    return json_response(session_object(service, info))


@router.delete("/{session}", response_model=answers.SessionDeleted, responses=ERRORS)
async def delete_session(request: Request, session: str) -> Response:
    """Forget a session; what it runs is cancelled."""
    service = await service_with(request, session)
    await service.sessions.delete(session, request.state.owner)
    return json_response({"session": session, "deleted": True})


@router.post(
    "/{session}/append",
    response_model=answers.Appended,
    responses=ERRORS,
    openapi_extra=body_schema(AppendBody),
)
async def append(request: Request, session: str) -> Response:
    """Feed text to a session without generating; with logprobs, how surprising it was."""
    service = await service_with(request, session)
    max_ids = service.limits.max_prompt_tokens
    body = keyed(request, await body_of(AppendBody, request, max_ids=max_ids))
    request_id = f"app-{secrets.token_hex(16)}"
    work = await append_request(service, request_id, request.state.owner, session, body)
    return JsonAnswer(service, work, LastEventsWriter(appended_body))


@router.post(
    "/{session}/fork",
    response_model=answers.Forked,
    responses=ERRORS,
    openapi_extra=body_schema(ForkBody, required=False),
)
async def fork(request: Request, session: str) -> Response:
    """Copies of a session, as it is or as it was when it had ``at`` tokens."""
    service = await service_with(request, session)
    body = await body_of(ForkBody, request, b"{}")
    forks = await service.sessions.fork(session, request.state.owner, body.n or 1, body.at)
    return json_response(forked(session, forks, service.async_engine.epoch_name))


@router.post(
    "/{session}/rewind",
    response_model=answers.SessionAnswer,
    responses=ERRORS,
    openapi_extra=body_schema(RewindBody),
)
async def rewind(request: Request, session: str) -> Response:
    """Cut a session's text back to ``at`` tokens; its epoch is a new one."""
    service = await service_with(request, session)
    body = await body_of(RewindBody, request)
    info = await service.sessions.rewind(session, request.state.owner, body.at)
    return json_response(session_object(service, info))


@router.post("/{session}/cancel", response_model=answers.SessionAnswer, responses=ERRORS)
async def cancel(request: Request, session: str) -> Response:
    """End what a session runs, also without a reader."""
    service, owner = await service_with(request, session), request.state.owner
    await service.sessions.cancel(session, owner)
    return json_response(session_object(service, await service.sessions.info(session, owner)))


@router.get(
    "/{session}/events", response_class=Response, responses=ERRORS | EVENT_STREAM | NO_MORE_EVENTS
)
async def events(
    request: Request,
    session: str,
    query: Annotated[EventsQuery, Query()],
    last_event_id: Annotated[str | SkipJsonSchema[None], Header()] = None,
) -> Response:
    """Server-sent events after a cursor, then those of what the session runs."""
    cursor = cursor_of(last_event_id, query)
    service, owner = await service_with(request, session), request.state.owner
    if request.state.is_head:  # which takes the session from no reader
        await service.sessions.info(session, owner)
        return Response(media_type="text/event-stream")
    again = bool(last_event_id)
    return EventsAnswer(service, session, owner, cursor, query.take_over, again)


@router.get("/{session}/text", response_model=answers.SessionText, responses=ERRORS)
async def text(request: Request, session: str, query: Annotated[TextQuery, Query()]) -> Response:
    """What a session has read and generated, as far as its log goes back."""
    service, owner = await service_with(request, session), request.state.owner
    if request.state.is_head:
        await service.sessions.info(session, owner)
        return Response(media_type="application/json")
    parts = await read_text(
        service.sessions, service.tokenizer, session, owner, query.start, query.max_tokens
    )
    info = await service.sessions.info(session, owner)
    start = query.start if query.start is not None else info.position
    answer = {
        "session": session,
        "epoch": service.async_engine.epoch_name(info.epoch),
        "start": parts[0].start if parts else start,
        "end": parts[-1].end if parts else start,
        "position": info.position,
        "parts": [asdict(part) for part in parts],
    }
    return json_response(answer)


@router.get(
    "/{session}/export",
    response_class=Response,
    responses=ERRORS | answer_content(STATE_TYPE, **STATE_SCHEMA),
)
async def export(request: Request, session: str) -> Response:
    """The session as one signed file."""
    service = await service_with(request, session)
    data = await service.transfer.export(session, request.state.owner)
    return Response(data, media_type=STATE_TYPE)


@router.post(
    "/import",
    response_model=answers.SessionCreated,
    responses=ERRORS,
    openapi_extra=body_content(STATE_TYPE, STATE_SCHEMA),
)
async def import_session(request: Request) -> Response:
    """A new session from a file that this server, or one with the same key, has signed.

    It becomes one of the model that it belongs to.
    """
    data, refusal = await request.body(), None
    for version in models_of(request).current.values():
        service = service_for(request, version.name)
        try:
            info = await service.transfer.take(data, request.state.owner)
        except (SnapshotMismatch, ImportRefused) as error:  # perhaps it is another model's
            refusal = refusal if isinstance(refusal, SnapshotMismatch) else error
        else:
            return json_response(created(info, service.async_engine.epoch_name))
    assert refusal is not None, "there is no model"
    raise refusal


def _listed(service: Service, one: Listed) -> dict[str, Any]:
    return {
        "session": one.id,
        "model": service.model.name,
        "epoch": service.async_engine.epoch_name(one.epoch),
        "position": one.length,
        "seq": one.seq,
        "busy": one.unfinished,
        "stored_bytes": one.stored_bytes,
    }
