"""What a key may do, by route and by message. What is not declared here is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from server.errors import RequestError

Scope = Literal["generate", "sessions", "read", "metrics", "admin"]
ALL_SCOPES: frozenset[Scope] = frozenset(get_args(Scope))
#: Of a key given as a flag.
CLIENT_SCOPES: frozenset[Scope] = ALL_SCOPES - {"admin"}

#: Of a route that needs no key. Over HTTP alone: every socket needs one.
OPEN: frozenset[Scope] = frozenset()

#: Every route by its template; one of the scopes is enough. With a route that is not here
#: the server does not start.
ROUTES: Mapping[str, frozenset[Scope]] = {
    "/": OPEN,
    "/health": OPEN,
    "/ready": OPEN,
    "/chat": OPEN,
    "/static": OPEN,
    "/v1/completions": frozenset({"generate"}),
    "/v1/chat/completions": frozenset({"generate"}),
    "/v1/responses": frozenset({"generate"}),
    "/v1/responses/{response_id}": frozenset({"sessions"}),
    "/v1/responses/{response_id}/cancel": frozenset({"sessions"}),
    "/v1/responses/{response_id}/input_items": frozenset({"sessions"}),
    "/v1/embeddings": frozenset({"generate"}),
    "/v1/score": frozenset({"generate"}),
    "/tokenize": frozenset({"generate", "read"}),
    "/detokenize": frozenset({"generate", "read"}),
    "/tokenizer_info": frozenset({"read"}),
    "/v1/stream": frozenset({"generate"}),
    "/v1/sessions": frozenset({"sessions"}),
    "/v1/sessions/import": frozenset({"sessions"}),
    "/v1/sessions/{session}": frozenset({"sessions"}),
    "/v1/sessions/{session}/append": frozenset({"sessions"}),
    "/v1/sessions/{session}/cancel": frozenset({"sessions"}),
    "/v1/sessions/{session}/events": frozenset({"sessions"}),
    "/v1/sessions/{session}/export": frozenset({"sessions"}),
    "/v1/sessions/{session}/fork": frozenset({"sessions"}),
    "/v1/sessions/{session}/rewind": frozenset({"sessions"}),
    "/v1/sessions/{session}/stream": frozenset({"sessions"}),
    "/v1/sessions/{session}/text": frozenset({"sessions"}),
    "/v1/models": frozenset({"read"}),
    "/v1/models/{model}": frozenset({"read"}),
    "/docs": frozenset({"read"}),
    "/openapi.json": frozenset({"read"}),
    "/asyncapi.json": frozenset({"read"}),
    "/metrics": frozenset({"metrics", "admin"}),
    "/v1/admin/tenants": frozenset({"admin"}),
    "/v1/admin/rebalance": frozenset({"admin"}),
    "/v1/admin/models": frozenset({"admin"}),
    "/v1/admin/models/{name}": frozenset({"admin"}),
    "/v1/admin/models/{name}/reload": frozenset({"admin"}),
    "/v1/admin/states": frozenset({"admin"}),
    "/v1/admin/states/{name}": frozenset({"admin"}),
}

#: What a client's messages on a socket want. Those that only give something back want nothing.
MESSAGES: dict[str, Scope | None] = {
    "create": "sessions",
    "generate": "generate",
    "append": "sessions",
    "resume": "sessions",
    "fork": "sessions",
    "rewind": "sessions",
    "delete": "sessions",
    "cancel": None,
    "detach": None,
}


class ScopeMissing(RequestError):
    """The key is right, and is not for this."""

    code = "scope_missing"

    def __init__(self, wanted: frozenset[Scope]) -> None:
        names = " or ".join(sorted(wanted))
        super().__init__(f"this key may not do that: it has no scope {names}")
