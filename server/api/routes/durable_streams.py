"""The route of a session's log as a durable stream: read by GET and HEAD, written by nothing."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from pydantic.json_schema import SkipJsonSchema
from starlette.responses import Response

from server.api.durable_streams.answers import (
    NO_STORE,
    FollowedPoll,
    FollowedSse,
    chunk_answer,
    head_of,
)
from server.api.durable_streams.messages import Messages
from server.api.routes.lookup import service_with
from server.api.schemas.openapi import ERRORS, Responses
from server.api.schemas.queries import StreamQuery
from server.errors import invalid
from server.sessions.log_stream import LogStream, place_of

router = APIRouter(prefix="/v1/sessions")

_CONTENT = {
    "application/json": {"schema": {"type": "array", "items": {"type": "object"}}},
    "text/plain": {"schema": {"type": "string"}},
    "text/event-stream": {},
}
ANSWERS: Responses = {
    200: {"content": _CONTENT},
    204: {"description": "nothing new came while the client waited"},
    304: {"description": "the client has this chunk"},
}


@router.get("/{session}/stream", response_class=Response, responses=ERRORS | ANSWERS)
async def stream(
    request: Request,
    session: str,
    query: Annotated[StreamQuery, Query()],
    if_none_match: Annotated[str | SkipJsonSchema[None], Header()] = None,
) -> Response:
    """What a session reads and generates, as a read-only stream of the Durable Streams protocol."""
    for name in ("offset", "live", "cursor", "format", "turn"):
        if len(request.query_params.getlist(name)) > 1:
            raise invalid(name, "must be given once")
    service, owner = await service_with(request, session), request.state.owner
    messages = Messages(session, query.format, service.async_engine.epoch_name)
    turn = None if query.turn is None else place_of(query.turn, "turn")
    log = LogStream(service.sessions, session, owner, service.tokenizer, messages, turn)
    if request.state.is_head:
        return Response(headers=head_of(await log.tail(), messages.content_type, NO_STORE))
    if query.live is not None and query.offset is None:
        raise invalid("offset", "is necessary with live")
    start = None
    if query.offset == "now":
        tail = await log.tail()
        if query.live is None:
            headers = head_of(tail, messages.content_type, NO_STORE)
            return Response(messages.body(()), headers=headers)
        start = tail.end
    elif query.offset not in (None, "-1"):
        start = place_of(query.offset)
    if query.live is None:
        return chunk_answer(messages, await log.chunk(start), if_none_match, {})
    live = FollowedSse if query.live == "sse" else FollowedPoll
    return live(service, log, messages, start, query.cursor)
