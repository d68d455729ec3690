"""The document at `/asyncapi.json`: `/v1/stream` in AsyncAPI 3, by the models that validate it.

https://www.asyncapi.com/docs/reference/specification/v3.0.0. Operations are those
of the server: it receives a client's message, and replies with frames.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args, get_type_hints

from fastapi import APIRouter, Request, Response
from orjson import dumps
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from server.api.auth import SUBPROTOCOL, Keyring
from server.api.routing import REF
from server.api.schemas.requests import Message
from server.api.schemas.responses import AnyFrame

ADDRESS = "/v1/stream"

#: The frames that answer each message. Every message may be answered with an error as well.
REPLIES: dict[str, tuple[str, ...]] = {
    "create": ("created",),
    "generate": ("started", "token", "finished", "migrate", "resumed"),
    "append": ("appended", "migrate"),
    "cancel": ("finished",),
    "delete": ("deleted",),
    "fork": ("forked",),
    "rewind": ("rewound",),
    "resume": ("resumed", "reset", "token", "finished", "migrate"),
    "detach": ("detached",),
}

router = APIRouter(include_in_schema=False)


@router.get("/asyncapi.json")
async def asyncapi(request: Request) -> Response:
    """The document, with the address that it was asked for at."""
    keyring: Keyring = request.app.state.keyring
    wants_key = keyring.caller(None) is None
    is_secure = request.url.scheme in ("https", "wss")
    made = document(request.app.version, request.url.netloc, wants_key, is_secure)
    return Response(dumps(made), media_type="application/json")


def document(version: str, host: str, wants_key: bool, is_secure: bool = False) -> dict[str, Any]:
    """The AsyncAPI document of a server at ``host``."""
    messages, frames = _by_type(Message), _by_type(AnyFrame)
    server: dict[str, Any] = {"host": host, "protocol": "wss" if is_secure else "ws"}
    if wants_key:
        server["security"] = [{"$ref": "#/components/securitySchemes/key"}]
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Everstream",
            "version": version,
            "description": "Token streams of many sessions over one WebSocket. "
            f"A client may offer the subprotocol {SUBPROTOCOL}.",
        },
        "defaultContentType": "application/json",
        "servers": {"here": server},
        "channels": {
            "stream": {
                "address": ADDRESS,
                "messages": {
                    name: {"$ref": f"#/components/messages/{name}"} for name in messages | frames
                },
                "bindings": {"ws": {"method": "GET", "bindingVersion": "0.1.0"}},
            }
        },
        "operations": {name: _operation(name) for name in messages},
        "components": {
            "messages": {
                name: _message(name, described) for name, described in (messages | frames).items()
            },
            "schemas": _schemas([*messages.values(), *frames.values()]),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "correlationIds": {
                "request": {
                    "description": "The client's name for its message.",
                    "location": "$message.payload#/request_id",
                }
            },
        },
    }


def _by_type(union: Any) -> dict[str, type]:
    """The types of a union by what they have in ``type``."""
    types: Iterable[type] = get_args(get_args(union)[0])
    return {get_args(get_type_hints(each)["type"])[0]: each for each in types}


def _name(described: type) -> str:
    """What the document calls a message or a frame."""
    return described.__name__.removesuffix("Frame")


def _operation(name: str) -> dict[str, Any]:
    channel = {"$ref": "#/channels/stream"}
    return {
        "action": "receive",
        "channel": channel,
        "messages": [_of_channel(name)],
        "reply": {
            "channel": channel,
            "messages": [_of_channel(reply) for reply in (*REPLIES[name], "error")],
        },
    }


def _of_channel(name: str) -> dict[str, str]:
    return {"$ref": f"#/channels/stream/messages/{name}"}


def _message(name: str, described: type) -> dict[str, Any]:
    return {
        "name": name,
        "title": name,
        "summary": (described.__doc__ or "").strip().partition("\n")[0],
        "payload": {"$ref": REF + _name(described)},
        "correlationId": {"$ref": "#/components/correlationIds/request"},
    }


def _schemas(types: Iterable[type]) -> dict[str, Any]:
    """The schema of every type under its own name, and those of its parts."""
    mode: JsonSchemaMode = "validation"
    inputs = [(each.__name__, mode, TypeAdapter[Any](each)) for each in types]
    _, made = TypeAdapter.json_schemas(inputs, ref_template=REF + "{model}")
    found: dict[str, Any] = _plain(made["$defs"])
    for each in types:
        schema = found.pop(each.__name__)
        found[_name(each)] = schema | {"title": _name(each)}
    return dict(sorted(found.items()))


def _plain(schema: Any) -> Any:
    """AsyncAPI's discriminator is the name of a property alone."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: _plain(value) for name, value in schema.items()}
    if isinstance(found := plain.get("discriminator"), dict) and "propertyName" in found:
        plain["discriminator"] = found["propertyName"]
    return plain
