"""Errors as llama.cpp's server shows them: with the status as their code."""

from __future__ import annotations

from typing import Any

import orjson

from server.api.errors import ErrorShape, error_object, outcome
from server.errors import RequestError


def llama_error(error: RequestError) -> dict[str, Any]:
    """The object of an error; ``reason`` is our code, ``param`` the field at fault."""
    ours = error_object(error)
    return {
        "error": {
            "code": outcome(error).status,
            "message": ours["message"],
            "type": ours["type"],
            "param": ours["param"],
            "reason": ours["code"],
        }
    }


ERRORS = ErrorShape(
    lambda error: orjson.dumps(llama_error(error)), lambda error: outcome(error).status
)
