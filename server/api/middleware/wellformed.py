"""What HTTP leaves open and no peer may use: endless heads, two framings, a bad Host or path."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import Scope

from server.api.errors import HeadTooLarge
from server.api.schemas.names import REFUSAL, has_control
from server.errors import invalid

# h11 bounds only a head that comes in pieces.
MAX_HEAD_BYTES = 32 * 1024

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?", re.ASCII)


def check_head(scope: Scope, headers: Headers) -> None:
    """Raises `HeadTooLarge`, or `InvalidRequest` for a head that may be read in two ways."""
    if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEAD_BYTES:
        raise HeadTooLarge(MAX_HEAD_BYTES)
    if not _HOST.fullmatch(headers.get("host", "")):
        raise invalid("Host", "must be a host name with an optional port")
    if has_control(scope["path"]):
        raise invalid("path", REFUSAL)
    if "content-length" in headers and "transfer-encoding" in headers:
        raise invalid("Content-Length", "must not come with Transfer-Encoding")
