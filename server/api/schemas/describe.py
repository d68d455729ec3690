"""What OpenAPI says of the routes that parse and write bytes themselves."""

from __future__ import annotations

from typing import Any

from server.api.schemas import responses as answers
from server.api.schemas.wire import Wire

#: Where a document has its schemas.
REF = "#/components/schemas/"

Responses = dict[int | str, dict[str, Any]]

_RETRY_AFTER = {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}}
_HEADERS = {
    401: {"WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}},
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
    507: _RETRY_AFTER,
}


def _errors(*statuses: int) -> Responses:
    return {
        status: {"model": answers.ErrorAnswer, "headers": _HEADERS.get(status, {})}
        for status in statuses
    }


#: OpenAPI's description of what may go wrong on every route, on those that want a key, and in work.
OPEN_ERRORS = _errors(400, 413, 431, 500)
KEY_ERRORS = OPEN_ERRORS | _errors(401, 403, 429, 503)
NOT_FOUND = _errors(404)
ERRORS = KEY_ERRORS | _errors(404, 408, 409, 410, 507)


def body_schema(body: type[Wire], required: bool = True) -> dict[str, Any]:
    """OpenAPI's description of a body that a route parses itself."""
    return body_content("application/json", {"$ref": REF + body.__name__}, required)


def body_content(media_type: str, schema: dict[str, Any], required: bool = True) -> dict[str, Any]:
    """OpenAPI's description of a body of any type."""
    return {"requestBody": {"required": required, "content": {media_type: {"schema": schema}}}}


def answer_content(media_type: str, **schema: str) -> Responses:
    """OpenAPI's description of an answer that is not JSON."""
    return {200: {"content": {media_type: {"schema": schema} if schema else {}}}}


EVENT_STREAM = answer_content("text/event-stream")
