"""Bytes to the wire's models, looked at once: errors name the field and never repeat its value.

The JSON is parsed before pydantic sees it, because pydantic would report a
hundred thousand wrong fields one by one. Its own strictness is that of Python
values; what that calls a list or a dictionary is told to the client as JSON does.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import orjson
import pydantic_core
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request as HttpRequest

from server.api.errors import invalid
from server.api.openai.unsupported import Refusal
from server.api.schemas import (
    MESSAGE_TYPES,
    Append,
    Fork,
    Generate,
    Message,
    Resume,
)
from server.api.wire import Wire
from server.engine.errors import InvalidRequest

MAX_NAME_CHARS = 64
MAX_IDS = 1 << 17
# A smaller body is parsed in the event loop: it takes less time than a thread costs.
MAX_INLINE_BYTES = 1 << 15

NONE: Mapping[str, Refusal] = MappingProxyType({})

Body = TypeVar("Body", bound=Wire)
T = TypeVar("T")

_MESSAGE: TypeAdapter[Message] = TypeAdapter(Message)
_MESSAGE_FIELDS = frozenset(
    name for message in (Generate, Append, Fork, Resume) for name in message.model_fields
)

_REQUEST_ID = re.compile(r'"request_id"\s*:\s*"([^"\\\x00-\x1f]{1,64})"')

#: What pydantic calls by Python's names, in those of JSON.
_IN_JSON = {
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a valid array",
}


def parse_body(model: type[Body], body: bytes, max_ids: int = MAX_IDS) -> Body:
    """A body as ``model``; raises `InvalidRequest` that names the first bad field.

    A list of more than ``max_ids``, lists in it included, is refused before anything
    looks at its items.
    """
    value = _loaded(body)
    if isinstance(value, dict):
        known = _fields_of(model)
        if not known.issuperset(value):
            value = _known_alone(value, known, model.refused)
        _check_sizes(value, max_ids)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _first_problem(error) from None


async def body_of(
    model: type[Body], request: HttpRequest, default: bytes = b"", max_ids: int = MAX_IDS
) -> Body:
    """The body of ``request``, or ``default`` where it is empty, by `parse_body`.

    A large one is parsed in a thread: other requests go on meanwhile.
    """
    body = await request.body() or default
    return await beside(len(body), lambda: parse_body(model, body, max_ids))


async def beside(num_bytes: int, call: Callable[[], T]) -> T:
    """The result of ``call``, which reads so many bytes: in a thread where these are many."""
    return call() if num_bytes <= MAX_INLINE_BYTES else await asyncio.to_thread(call)


def parse_message(text: str, max_ids: int = MAX_IDS) -> Message:
    """A client's frame; like `parse_body`."""
    value = _loaded(text)
    if isinstance(value, dict):
        _known_alone(value, _MESSAGE_FIELDS)
        _check_sizes(value, max_ids)
    try:
        return _MESSAGE.validate_python(value)
    except ValidationError as error:
        raise _first_problem(error, tagged=True) from None


@functools.cache
def _fields_of(model: type[Wire]) -> frozenset[str]:
    return frozenset(model.model_fields)


def _loaded(text: bytes | str) -> Any:
    """The JSON value; where orjson sees none, another parser says what is wrong.

    That one lets NaN and infinities pass, so that pydantic can name their field.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        return pydantic_core.from_json(text)
    except ValueError as error:
        message = f"the message is not a JSON object: invalid JSON: {error}"
        raise InvalidRequest(message) from None


def _known_alone(
    value: dict[str, Any], known: frozenset[str], refused: Mapping[str, Refusal] = NONE
) -> dict[str, Any]:
    """``value`` without fields that ask for nothing; raises at the first that nobody knows."""
    kept: dict[str, Any] = {}
    for name, item in value.items():
        if name in known:
            kept[name] = item
        elif name not in refused:
            raise invalid(name[:MAX_NAME_CHARS], "extra inputs are not permitted")
        elif not refused[name].accepts(item):
            raise invalid(name, refused[name].message)
    return kept


def _check_sizes(value: dict[str, Any], max_ids: int) -> None:
    """Before pydantic looks at what takes long."""
    for name, items in value.items():
        if isinstance(items, list) and _num_items(items) > max_ids:
            raise invalid(name, f"must have at most {max_ids} tokens")


def _num_items(items: list[Any]) -> int:
    if len(items) > 0 and isinstance(items[0], list):
        return sum(len(item) for item in items if isinstance(item, list))
    return len(items)


def named_in(text: str) -> str | None:
    """What looks like the ``request_id`` of a frame that is not worth parsing."""
    found = _REQUEST_ID.search(text)
    return None if found is None else found[1]


def request_id_of(text: str) -> str | None:
    """The ``request_id`` of a frame that is not a message, to answer it by.

    Read by Python's lenient parser: a NaN or a lone surrogate elsewhere in the
    frame is no reason to leave its sender without an answer.
    """
    try:
        frame = json.loads(text)
        found = frame.get("request_id") if isinstance(frame, dict) else None
        if isinstance(found, str) and len(found) <= 64 and found.encode():
            return found
    except (ValueError, RecursionError):  # no JSON, or an id that is no Unicode text
        pass
    return None


def _first_problem(error: ValidationError, *, tagged: bool = False) -> InvalidRequest:
    """The deepest of the first field's problems: in a union, that of the nearest type.

    The value is not repeated: it may be long, and it is the client's secret.
    """
    problems = error.errors(include_url=False, include_input=False)
    first = _path(problems[0], tagged)[:1]
    nearest: Any = max(
        (problem for problem in problems if _path(problem, tagged)[:1] == first),
        key=lambda problem: len(problem["loc"]),
    )
    message = nearest["msg"][0].lower() + nearest["msg"][1:]
    message = message.replace("input should be ", "must be ").replace("input should ", "must ")
    message = _IN_JSON.get(nearest["type"], message)
    if nearest["type"] in ("union_tag_not_found", "union_tag_invalid"):
        if not first:
            return invalid("type", f"must be one of {', '.join(MESSAGE_TYPES)}")
        context = nearest.get("ctx", {})
        expected, tag = context.get("expected_tags"), context.get("discriminator", "'type'")
        message = f"{tag[1:-1]} must be one of {expected}" if expected else "must have a known type"
    if not first:
        return InvalidRequest(f"the message is not a JSON object: {message}")
    return invalid(str(first[0])[:MAX_NAME_CHARS], message)


def _path(problem: Any, tagged: bool) -> tuple[int | str, ...]:
    """Where a problem is, without the name of the message's type in front."""
    loc: tuple[int | str, ...] = problem["loc"]
    return loc[1:] if tagged else loc
