"""The absolute form of a request target: `GET http://host/path HTTP/1.1` (RFC 9112, 3.2.2)."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

_ABSOLUTE = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)


def in_origin_form(scope: dict[str, Any]) -> dict[str, Any]:
    """``scope`` as if the client had sent the path alone, and the target's host as `Host`."""
    found = _ABSOLUTE.fullmatch(scope["raw_path"])
    if found is None:
        return scope
    host, raw_path = found[1], found[2] or b"/"
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    return {
        **scope,
        "path": unquote(raw_path.decode("ascii")),
        "raw_path": raw_path,
        "headers": [(b"host", host), *headers],
    }
