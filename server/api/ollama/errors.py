"""Errors as Ollama's API shows them: one text, with our own ``code`` and ``param`` next to it."""

from __future__ import annotations

import orjson
from typing_extensions import TypedDict

from server.api.errors import ErrorShape, error_object, outcome
from server.errors import RequestError


class OllamaErrorAnswer(TypedDict):
    """Every error under these paths; ``code`` and ``param`` are those of all our errors."""

    error: str
    code: str
    param: str | None


def ollama_error(error: RequestError) -> OllamaErrorAnswer:
    """The body, and the last line of a stream that cannot be finished."""
    ours = error_object(error)
    return {"error": ours["message"], "code": ours["code"], "param": ours["param"]}


ERRORS = ErrorShape(
    lambda error: orjson.dumps(ollama_error(error)), lambda error: outcome(error).status
)
