"""JSON of what a client says, with errors that name the field which no JSON can carry."""

from __future__ import annotations

import json
from collections.abc import Mapping

from .errors import InvalidRequest


def encode(fields: Mapping[str, object]) -> bytes:
    """Fields as JSON, without those that are None. Raises `InvalidRequest` that names a field."""
    members = (_member(name, value) for name, value in fields.items() if value is not None)
    return b"{" + b",".join(members) + b"}"


def _member(name: str, value: object) -> bytes:
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, default=list)
        return f'"{name}":{text}'.encode()
    except (TypeError, ValueError) as error:
        message = f"{name}: cannot be sent as JSON: {error}"
        raise InvalidRequest(message, "invalid_value", name) from error
