"""Pages of other origins that the operator allows: what a browser asks before, and lets them read.

No cookies are involved, so that an allowed origin may send any header: it needs a key all the
same. Errors are JSON here as everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from server.api.errors import ForeignOrigin, MethodNotAllowed

METHODS = ("GET", "HEAD", "POST", "DELETE")
#: Ours that a page may read, apart from those that every page may.
EXPOSED = (
    *("Allow", "Retry-After", "WWW-Authenticate", "X-Request-Id"),
    *("ETag", "Stream-Next-Offset", "Stream-Up-To-Date", "Stream-Closed", "Stream-Cursor"),
)
MAX_AGE_S = 600
MAX_HEADERS_CHARS = 4096

_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")


class Cors:
    """Marks the answers to ``allowed`` origins, where ``*`` is every origin."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(allowed)

    def marks(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Headers for the answer to a request that has an origin."""
        marks = [(b"vary", b"Origin")]
        if self._allows(headers["origin"]):
            marks.append((b"access-control-allow-origin", headers["origin"].encode("latin-1")))
            marks.append((b"access-control-expose-headers", ", ".join(EXPOSED).encode()))
        return marks

    def is_preflight(self, scope: Scope, headers: Headers) -> bool:
        return scope["method"] == "OPTIONS" and "access-control-request-method" in headers

    def preflight(self, headers: Headers) -> Response:
        """The answer to a preflight. Raises `ForeignOrigin` or `MethodNotAllowed`."""
        if not self._allows(headers["origin"]):
            raise ForeignOrigin
        if headers["access-control-request-method"] not in METHODS:
            raise MethodNotAllowed
        allowed = {
            "access-control-allow-methods": ", ".join(METHODS),
            "access-control-max-age": str(MAX_AGE_S),
        }
        wanted = headers.get("access-control-request-headers", "")
        if len(wanted) <= MAX_HEADERS_CHARS and _NAMES.fullmatch(wanted):
            allowed["access-control-allow-headers"] = wanted
        return Response(status_code=200, headers=allowed)

    def _allows(self, origin: str) -> bool:
        return "*" in self._allowed or origin in self._allowed
