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
MAX_COPIES = 8
#: A line for each answer: method, path, status.
SEEN_FILE = "seen"


@schemathesis.serializer("application/vnd.everstream.session")
def session_file(context: SerializationContext, value: Any) -> bytes:
    """Any bytes, or, every other time, those of a session."""
    data: bytes = getattr(value, "data", value)
    return data if len(data) % 2 else Path(SESSION_FILE).read_bytes()


@schemathesis.hook
def before_call(context: HookContext, case: Case[Any], kwargs: dict[str, Any]) -> None:
    """Gives a right body the prompt that it needs, and bounds what would fill the server."""
    is_right = case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE
    if not is_right or not isinstance(case.body, dict):
        return
    if case.path == "/v1/completions":
        case.body["prompt"] = case.body.get("prompt") or "hi"
    if isinstance(num := case.body.get("n"), int):
        case.body["n"] = min(num, MAX_COPIES)


@schemathesis.hook
def after_call(context: HookContext, case: Case[Any], response: Response) -> None:
    """Writes down what came."""
    with Path(SEEN_FILE).open("a") as seen:
        seen.write(f"{case.operation.label} {response.status_code}\n")
