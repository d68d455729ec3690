"""Errors as llama.cpp's server shows them: with the status as their code."""

from __future__ import annotations

import orjson
from typing_extensions import TypedDict

from server.api.errors import ErrorShape, error_object, outcome
from server.errors import RequestError


class LlamaErrorDetail(TypedDict):
    """``code`` is the HTTP status; ``reason`` is the code of all our errors."""

    code: int
    message: str
    type: str
    param: str | None
    reason: str


class LlamaErrorAnswer(TypedDict):
    """Every error under these paths."""

    error: LlamaErrorDetail


def llama_error(error: RequestError) -> LlamaErrorAnswer:
    """The body, and the last event of a stream that cannot be finished."""
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
