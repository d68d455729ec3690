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
#: Named states of the server: one to be read, one to be deleted.
STATES = ("kept", "gone")
#: A line for each answer: method, path, status.
SEEN_FILE = "seen"
#: A line for each response that is stored: its id.
RESPONSES_FILE = "responses"


@schemathesis.serializer("application/vnd.everstream.session", "application/vnd.everstream.state")
def session_file(context: SerializationContext, value: Any) -> bytes:
    """Any bytes, or, every other time, those of a session, which can be kept as a state too."""
    data: bytes = getattr(value, "data", value)
    return data if len(data) % 2 else Path(SESSION_FILE).read_bytes()


@schemathesis.hook
def before_call(context: HookContext, case: Case[Any], kwargs: dict[str, Any]) -> None:
    """Gives a right body the prompt that it needs, and bounds what would fill the server."""
    is_right = case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE
    if is_right and "response_id" in case.path_parameters and Path(RESPONSES_FILE).exists():
        case.path_parameters["response_id"] = stored_response(is_last=case.method == "DELETE")
    if is_right and case.path.startswith("/v1/admin/states"):
        case.query = {name: value for name, value in (case.query or {}).items() if name == "name"}
        if "name" in case.path_parameters:
            case.path_parameters["name"] = STATES[case.method == "DELETE"]
    if not is_right or not isinstance(case.body, dict):
        return
    if case.path == "/v1/completions":
        case.body["prompt"] = case.body.get("prompt") or "hi"
    if isinstance(num := case.body.get("n"), int):
        case.body["n"] = min(num, MAX_COPIES)


def stored_response(is_last: bool) -> str:
    """The id of a response that can be read: the newest one, or the oldest, for the last time.

    One is always left.
    """
    oldest, *others = Path(RESPONSES_FILE).read_text().split() or ["resp_none"]
    if is_last and others:
        Path(RESPONSES_FILE).write_text("\n".join(others) + "\n")
        return oldest
    return "resp_none" if is_last else [oldest, *others][-1]


@schemathesis.hook
def after_call(context: HookContext, case: Case[Any], response: Response) -> None:
    """Writes down what came."""
    with Path(SEEN_FILE).open("a") as seen:
        seen.write(f"{case.operation.label} {response.status_code}\n")
    is_made = case.operation.label == "POST /v1/responses" and response.status_code == 200
    if is_made and response.headers["content-type"][0] == "application/json":
        with Path(RESPONSES_FILE).open("a") as stored:
            stored.write(response.json()["id"] + "\n" if response.json()["store"] else "")
