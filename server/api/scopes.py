"""What a key may do, by route and by message.

The table is of paths: it stands in front of the router, so that it holds for
WebSockets, wrong methods and routes that do not exist as well.
"""

from __future__ import annotations

from typing import Literal, get_args

from server.engine.errors import EngineError

Scope = Literal["generate", "sessions", "read", "metrics", "admin"]
ALL_SCOPES: frozenset[Scope] = frozenset(get_args(Scope))
#: Of a key given as a flag.
CLIENT_SCOPES: frozenset[Scope] = ALL_SCOPES - {"admin"}

#: A path, or all that is below one that ends with a slash. One of the scopes is enough.
PATHS: tuple[tuple[str, frozenset[Scope]], ...] = (
    ("/v1/completions", frozenset({"generate"})),
    ("/v1/chat/completions", frozenset({"generate"})),
    ("/v1/responses", frozenset({"generate"})),
    ("/v1/responses/", frozenset({"sessions"})),
    ("/v1/embeddings", frozenset({"generate"})),
    ("/v1/score", frozenset({"generate"})),
    ("/tokenize", frozenset({"generate", "read"})),
    ("/detokenize", frozenset({"generate", "read"})),
    ("/tokenizer_info", frozenset({"read"})),
    ("/v1/stream", frozenset({"generate"})),
    ("/v1/sessions", frozenset({"sessions"})),
    ("/v1/sessions/", frozenset({"sessions"})),
    ("/v1/models", frozenset({"read"})),
    ("/v1/models/", frozenset({"read"})),
    ("/docs", frozenset({"read"})),
    ("/openapi.json", frozenset({"read"})),
    ("/asyncapi.json", frozenset({"read"})),
    ("/metrics", frozenset({"metrics", "admin"})),
    ("/v1/admin/", frozenset({"admin"})),
)

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


class ScopeMissing(EngineError):
    """The key is right, and is not for this."""

    code = "scope_missing"

    def __init__(self, wanted: frozenset[Scope]) -> None:
        names = " or ".join(sorted(wanted))
        super().__init__(f"this key may not do that: it has no scope {names}")


def scopes_of(path: str) -> frozenset[Scope] | None:
    """The scopes of which one opens ``path``; None where the table does not have it."""
    for known, scopes in PATHS:
        if path == known or (known.endswith("/") and path.startswith(known)):
            return scopes
    return None
