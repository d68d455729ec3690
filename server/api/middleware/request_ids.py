"""A name for every request, in ``x-request-id`` of its answer and in what is logged of it.

A client may give its own, to find its request again; what cannot be one is replaced.
"""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers
from starlette.types import Scope

HEADER = "x-request-id"
#: Where a scope's state has it.
STATE = "http_request_id"

_VALID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}", re.ASCII)


def new_request_id() -> str:
    """Unguessable, and not the same twice."""
    return f"req_{secrets.token_hex(16)}"


def request_id_of(scope: Scope) -> str:
    """The id of a request, the same each time: it is kept in the scope's state."""
    state = scope.setdefault("state", {})
    if STATE not in state:
        given = Headers(scope=scope).get(HEADER, "")
        state[STATE] = given if _VALID.fullmatch(given) else new_request_id()
    id: str = state[STATE]
    return id
