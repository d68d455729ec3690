"""Bytes to the wire's models, looked at once: errors name the field and never repeat its value.

The JSON is parsed before pydantic sees it, because pydantic would report a
hundred thousand wrong fields one by one. Its own strictness is that of Python
values; what that calls a list or a dictionary is told to the client as JSON does.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import orjson
import pydantic_core
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError
from starlette.requests import Request as HttpRequest

from server.api.schemas.wire import FIELD_ERROR, Wire, in_our_names
from server.errors import InvalidRequest, invalid

MAX_NAME_CHARS = 64
#: Where a scope's state has the names of fields without effect: see `ignore`.
IGNORED = "ignored"
MAX_PLACE_CHARS = 256
# A smaller body is parsed in the event loop: it takes less time than a thread costs.
MAX_INLINE_BYTES = 1 << 15

Body = TypeVar("Body", bound=Wire)
T = TypeVar("T")
NO_NAMES: Mapping[str, str] = {}

#: What pydantic calls by Python's names, in those of JSON.
_IN_JSON = {
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a valid array",
    "extra_forbidden": "there is no such field",
}


def parse_body(model: type[Body], body: bytes, max_ids: int | None = None) -> Body:
    """A body as ``model``; raises `InvalidRequest` that names the first bad field.

    A list of more than ``max_ids``, lists in it included, is refused before anything
    looks at its items; None where the body's bytes are bound enough.
    """
    return _parsed(model.model_validate, body, max_ids, model.other_names)


async def body_of(
    model: type[Body], request: HttpRequest, default: bytes = b"", max_ids: int | None = None
) -> Body:
    """The body of ``request``, or ``default`` where it is empty, by `parse_body`.

    A large one is parsed in a thread: other requests continue meanwhile. What it has of the hints
    of `Wire` is listed in the answer's head.
    """
    # Not `request.body()`, which would keep it for as long as the answer takes.
    body = b"".join([part async for part in request.stream()]) or default
    ignored: set[str] = set()
    validate = partial(model.model_validate, context=ignored)
    if len(body) <= MAX_INLINE_BYTES:
        parsed = _parsed(validate, body, max_ids, model.other_names)
    else:
        parsed = await asyncio.to_thread(_parsed, validate, body, max_ids, model.other_names)
    ignore(request, *ignored)
    return parsed


def ignore(request: HttpRequest, *names: str) -> None:
    """Has the answer's head list ``names``: fields of the request that have no effect here."""
    if names:
        request.scope["state"].setdefault(IGNORED, set()).update(names)


async def in_thread_if_large(num_bytes: int, call: Callable[[], T]) -> T:
    """The result of ``call``, which reads so many bytes: in a thread where these are many."""
    return call() if num_bytes <= MAX_INLINE_BYTES else await asyncio.to_thread(call)


def parse_tagged(
    union: TypeAdapter[T], tags: Sequence[str], text: str, max_ids: int | None = None
) -> T:
    """A frame as that of ``union`` which its ``type`` names, one of ``tags``; like `parse_body`."""
    return _parsed(union.validate_python, text, max_ids, tags=tags)


def without_mark(text: bytes | str) -> bytes | str:
    """``text`` without the byte order mark that some editors and shells put before it."""
    if isinstance(text, bytes):
        return text.removeprefix(codecs.BOM_UTF8)
    return text.removeprefix("\ufeff")


def _parsed(
    validate: Callable[[Any], T],
    text: bytes | str,
    max_ids: int | None,
    names: Mapping[str, str] = NO_NAMES,
    tags: Sequence[str] = (),
) -> T:
    text = without_mark(text)
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = _loaded(text)
    if max_ids is not None and isinstance(value, dict):
        _check_sizes(value, max_ids)
    ours = value
    try:
        ours = in_our_names(value, names) if isinstance(value, dict) else value
        return validate(ours)
    except PydanticCustomError as error:
        raise invalid((error.context or {})["field"], error.message()) from None
    except ValidationError as error:
        raise _in_their_name(_first_problem(error, ours, tags), value, names) from None


def _in_their_name(
    error: InvalidRequest, value: object, names: Mapping[str, str]
) -> InvalidRequest:
    """``error`` with the client's name of its field, where the client has given it another one."""
    if not isinstance(value, dict) or error.param is None or error.param in value:
        return error
    theirs = (theirs for theirs, ours in names.items() if ours == error.param and theirs in value)
    name = next(theirs, error.param)
    return invalid(name, error.message.removeprefix(f"{error.param}: "))


def _loaded(text: bytes | str) -> Any:
    """The JSON value of what orjson refuses; raises `InvalidRequest` that says what is wrong.

    This parser lets NaN and infinities pass, so that pydantic can name their field.
    """
    if text[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise InvalidRequest("the message is not a JSON object: it is in UTF-16, not in UTF-8")
    try:
        return pydantic_core.from_json(text)
    except ValueError as error:
        message = f"the message is not a JSON object: invalid JSON: {error}"
        raise InvalidRequest(message) from None


def _check_sizes(value: dict[str, Any], max_ids: int) -> None:
    """Before pydantic looks at what takes long."""
    for name, items in value.items():
        if isinstance(items, list) and _num_items(items) > max_ids:
            raise invalid(name, f"must have at most {max_ids} tokens")


def _num_items(items: list[Any]) -> int:
    if len(items) > 0 and isinstance(items[0], list):
        return sum(len(item) for item in items if isinstance(item, list))
    return len(items)


def _first_problem(error: ValidationError, value: object, tags: Sequence[str]) -> InvalidRequest:
    """The deepest of the first item's problems: in a union, that of the nearest type.

    The value is not repeated: it may be long, and it is the client's secret.
    """
    nearest = _nearest(error.errors(include_url=False, include_input=False), value)
    place = _text(_place(nearest, value))
    message = nearest["msg"][0].lower() + nearest["msg"][1:]
    message = message.replace("input should be ", "must be ").replace("input should ", "must ")
    message = _IN_JSON.get(nearest["type"], message)
    if nearest["type"] in ("union_tag_not_found", "union_tag_invalid"):
        if not place:
            return invalid("type", f"must be one of {', '.join(tags)}")
        context = nearest.get("ctx", {})
        expected, tag = context.get("expected_tags"), context.get("discriminator", "'type'")
        message = f"{tag[1:-1]} must be one of {expected}" if expected else "must have a known type"
    if not place:
        return InvalidRequest(f"the message is not a JSON object: {message}")
    return invalid(place, message)


def _nearest(problems: Sequence[Any], value: object) -> Any:
    """The deepest of those of the first field, and in a list of its first bad item."""
    placed = [(problem, _place(problem, value)) for problem in problems]
    field = placed[0][1][:1]
    own = [(problem, place[1:2]) for problem, place in placed if place[:1] == field]
    items = (place[0] for _, place in own if place)
    first = min((item for item in items if isinstance(item, int)), default=None)
    near = (problem for problem, place in own if first is None or place in ((), (first,)))
    return max(near, key=lambda problem: len(problem["loc"]))


def _place(problem: Any, value: Any) -> tuple[int | str, ...]:
    """Where in ``value`` a problem is; the names of types are left out."""
    place: list[int | str] = []
    for step in problem["loc"]:
        if isinstance(step, int) and isinstance(value, list):
            place.append(step)
            value = value[step] if step < len(value) else None
        elif isinstance(value, dict) and step in value:
            place.append(step)
            value = value[step]
    if problem["type"] == "missing":
        place.append(problem["loc"][-1])
    if problem["type"] == FIELD_ERROR:
        place.append(problem["ctx"]["field"])
    return tuple(place)


def _text(place: Sequence[int | str]) -> str:
    """As clients read it: ``messages[2].content``."""
    steps = (
        f"[{step}]" if isinstance(step, int) else f".{step[:MAX_NAME_CHARS]}" for step in place
    )
    return "".join(steps).removeprefix(".")[:MAX_PLACE_CHARS]
