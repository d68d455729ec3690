"""What a key may do, by route and by message. What is not declared here is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute

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


class UndeclaredRoute(Exception):
    """A route without a row in `ROUTES`: our own mistake."""


class RouteTable:
    """Built once, from all routes. Raises `UndeclaredRoute`."""

    def __init__(
        self, routes: Iterable[BaseRoute], declared: Mapping[str, frozenset[Scope]] = ROUTES
    ) -> None:
        self._rows: dict[str, dict[re.Pattern[str], frozenset[Scope]]]
        self._rows = {"http": {}, "websocket": {}}
        for route in routes:
            kind = "websocket" if isinstance(route, WebSocketRoute) else "http"
            if not isinstance(route, Route | WebSocketRoute | Mount) or route.path not in declared:
                raise UndeclaredRoute(f"{kind} route {getattr(route, 'path', route)!r}: no scope")
            self._rows[kind][route.path_regex] = declared[route.path]

    def scopes_of(self, kind: str, path: str) -> list[frozenset[Scope]]:
        """For each template with this path, the scopes of which one opens it; empty without any.

        ``kind`` is "http" or "websocket". Where several templates have the path, all of
        them must be open to a caller.
        """
        rows = self._rows[kind].items()
        return [scopes for pattern, scopes in rows if pattern.fullmatch(path)]
