"""Encodes messages as JSON, with errors that name the field that JSON cannot represent."""

from __future__ import annotations

import json
from collections.abc import Mapping

from .errors import InvalidRequest


def encode(fields: Mapping[str, object]) -> bytes:
    """Encodes the fields that are not None. Raises `InvalidRequest`, which names the field."""
    members = (_member(name, value) for name, value in fields.items() if value is not None)
    return b"{" + b",".join(members) + b"}"


def _member(name: str, value: object) -> bytes:
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, default=list)
        return f'"{name}":{text}'.encode()
    except (TypeError, ValueError) as error:
        message = f"{name}: cannot be sent as JSON: {error}"
        raise InvalidRequest(message, "invalid_value", name) from error
