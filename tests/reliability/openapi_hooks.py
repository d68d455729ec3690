"""What the fuzzer of the OpenAPI document cannot know by itself, and what it saw.

Its process imports this, in a folder of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import schemathesis
from schemathesis import Case, GenerationMode, HookContext, Response, SerializationContext

#: A file that the server has exported.
SESSION_FILE = "session"
#: A line for each answer: method, path, status.
SEEN_FILE = "seen"


@schemathesis.serializer("application/vnd.everstream.session")
def session_file(context: SerializationContext, value: Any) -> bytes:
    """Any bytes, or, every other time, those of a session."""
    data: bytes = getattr(value, "data", value)
    return data if len(data) % 2 else Path(SESSION_FILE).read_bytes()


@schemathesis.hook
def before_call(context: HookContext, case: Case[Any], kwargs: dict[str, Any]) -> None:
    """Gives a right body the prompt that it needs."""
    is_right = case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE
    if is_right and case.path == "/v1/completions" and isinstance(case.body, dict):
        case.body["prompt"] = case.body.get("prompt") or "hi"


@schemathesis.hook
def after_call(context: HookContext, case: Case[Any], response: Response) -> None:
    """Writes down what came."""
    with Path(SEEN_FILE).open("a") as seen:
        seen.write(f"{case.operation.label} {response.status_code}\n")
