"""What routes share: dialects, which service a request is for, and what OpenAPI says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers

from server.api.errors import ErrorShape
from server.api.schemas import responses as answers
from server.api.schemas.requests import Once
from server.api.schemas.wire import IdempotencyKey, Wire
from server.errors import invalid
from server.models.registry import Models
from server.models.service import Service

#: Where a scope's state has the `Dialect` of its request, or None for OpenAI's and our own.
DIALECT = "dialect"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Another server's API on this one.

    A request with a path and headers that it ``owns`` gets the errors of that API, also from what
    stands before the routes: keys, limits, sizes, and paths that are not there.
    """

    name: str
    router: APIRouter
    owns: Callable[[str, Headers], bool]
    errors: ErrorShape
    #: The header that its clients read the request's id from, next to ours.
    request_id_header: str | None = None


# -------------------------------------------------------------------------------------------------
# Which service a request is for.
#
# It is held until the request has been answered: a version may be replaced meanwhile.


def models_of(request: Request) -> Models:
    """The models of the app that ``request`` came to."""
    models: Models = request.app.state.models
    return models


def service_for(request: Request, model: str | None = None) -> Service:
    """The service of ``model``, or of the default one. Raises `ModelNotFound`."""
    models: Models = request.app.state.models
    service = models.default if model is None else models.service(model)
    request.state.held.enter_context(service.async_engine.use())
    return service


async def service_with(request: Request, session: str | None, model: str | None = None) -> Service:
    """The service that has ``session``; without a session, that of ``model``.

    A session is looked for in all models where none is named, in versions that still end
    what they run, too. Raises `RequestError`.
    """
    if session is None:
        return service_for(request, model)
    models: Models = request.app.state.models
    service = await models.holding(session, request.state.owner, model)
    request.state.held.enter_context(service.async_engine.use())
    return service


# -------------------------------------------------------------------------------------------------
# The client's name for a request, by which it can be sent again: a field, or a header that every
# client library can send.


KEY_HEADER = "Idempotency-Key"
_KEY: TypeAdapter[str] = TypeAdapter(IdempotencyKey)

Named = TypeVar("Named", bound=Once)


def keyed(request: Request, body: Named) -> Named:
    """``body`` with the key of the request's header, if it has one.

    What has a key is kept. Raises `ScopeMissing` where the caller may keep nothing, and
    `InvalidRequest` for what cannot be a key, or for another one in the body.
    """
    key = request.headers.get(KEY_HEADER)
    if key is not None:
        try:
            _KEY.validate_python(key)
        except ValidationError:
            raise invalid(KEY_HEADER, "must have 1 to 128 characters, none of control") from None
        if body.idempotency_key not in (None, key):
            raise invalid("idempotency_key", f"is not the key of the header {KEY_HEADER}")
        body = body.model_copy(update={"idempotency_key": key})
    if body.idempotency_key is not None:
        request.state.caller.require("sessions")
    return body


# -------------------------------------------------------------------------------------------------
# OpenAPI: what it says of routes that parse and write bytes themselves, and the whole document.
#
# The document at `/openapi.json` is FastAPI's, with what this adds.


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


def _errors(*statuses: int, model: Any = answers.ErrorAnswer) -> Responses:
    return {status: {"model": model, "headers": _HEADERS.get(status, {})} for status in statuses}


#: OpenAPI's description of what may go wrong on every route, on those that want a key, and in work.
OPEN_ERRORS = _errors(400, 413, 431, 500)
KEY_ERRORS = OPEN_ERRORS | _errors(401, 403, 429, 503)
NOT_FOUND = _errors(404)
ERRORS = KEY_ERRORS | _errors(404, 408, 409, 410, 507)


def errors_as(model: Any) -> Responses:
    """The same as `ERRORS` of a dialect, whose errors are of another form."""
    return {status: {**described, "model": model} for status, described in ERRORS.items()}


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
NO_MORE_EVENTS: dict[int | str, dict[str, Any]] = {
    204: {"description": "nothing comes after the Last-Event-ID"}
}


def openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the bodies that the routes parse themselves, and our errors."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, definitions = models_json_schema(
            [(body, "validation") for body in _bodies(document["paths"])],
            ref_template=REF + "{model}",
        )
        schemas = document["components"]["schemas"]
        schemas |= definitions["$defs"]
        for theirs in ("HTTPValidationError", "ValidationError"):
            schemas.pop(theirs, None)
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # what that is to FastAPI is a 400 here
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        if app.state.keyring.caller(None) is None:
            document["security"] = [{"key": []}]
        app.openapi_schema = document
    return app.openapi_schema


def _bodies(paths: dict[str, dict[str, Any]]) -> list[type[Wire]]:
    """The models of the bodies that the routes parse themselves: see `body_schema`."""
    known, bodies = {model.__name__: model for model in _kinds(Wire)}, set()
    for operations in paths.values():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                bodies.add(content["schema"].get("$ref", "").removeprefix(REF))
    return [known[name] for name in sorted(bodies - {""})]


def _kinds(model: type[Wire]) -> Iterator[type[Wire]]:
    for kind in model.__subclasses__():
        yield kind
        yield from _kinds(kind)
