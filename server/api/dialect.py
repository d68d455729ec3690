"""What an API next to OpenAI's consists of for the rest of the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import APIRouter
from starlette.datastructures import Headers

from server.api.errors import ErrorShape

#: Where a scope's state has the `Dialect` of its request, or None for OpenAI's and our own.
STATE = "dialect"


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
