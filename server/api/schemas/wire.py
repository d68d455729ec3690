"""What comes over the wire: strict fields and names, queries, and bytes made into models."""

from __future__ import annotations

import asyncio
import codecs
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
import pydantic_core
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue, SkipJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError
from starlette.requests import Request as HttpRequest

from server.engine.prefixes import MAX_HANDLE_CHARS
from server.errors import InvalidRequest, invalid

# -------------------------------------------------------------------------------------------------
# The base of all that comes over the wire: no unknown fields, no coercion, no NaN.
#
# A field that is unknown, or refused with a reason, is accepted where its value asks
# for nothing: null, or the default.


#: The error that names its field itself: see `server.api.schemas.wire`.
FIELD_ERROR = "field"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field is not supported; ``accepted`` are the values that mean its default."""

    reason: str
    accepted: tuple[object, ...] = ()

    @property
    def message(self) -> str:
        """The reason as it follows the field's name."""
        return self.reason if self.reason.startswith("is ") else f"is not supported: {self.reason}"

    def accepts(self, value: object) -> bool:
        """Whether ``value``, out of JSON, asks for nothing."""
        if isinstance(value, dict):
            value = {name: item for name, item in value.items() if item is not None}
        return value is None or any(_same(value, default) for default in self.accepted)


def _same(value: object, default: object) -> bool:
    """Like Python's equality, but true does not equal 1."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)


class Wire(BaseModel):
    """Base of all messages from a client.

    ``refused`` has the fields that other servers know and this one does not: see
    `server.api.openai.bodies`. ``hints`` have no effect here, whatever they say, and are
    listed in the head of the answer.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    refused: ClassVar[Mapping[str, Refusal]] = {}
    #: Of a whole body: what other servers call its fields, and what they are called here.
    other_names: ClassVar[Mapping[str, str]] = {}
    hints: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _known_alone(cls, value: object, info: ValidationInfo) -> object:
        """Stops at the first unknown field: there may be a hundred thousand.

        The hints that ``value`` has are added to the set that is the context, if there is one.
        """
        if not isinstance(value, dict) or field_names(cls).issuperset(value):
            return value
        known = known_alone(cls, value, cls.refused, cls.hints)
        if isinstance(info.context, set):
            info.context.update(name for name in cls.hints if value.get(name) is not None)
        return known

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Says what is accepted apart from fields: nulls, hints, and all where it is history."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        is_strict = cls.model_config.get("extra") == "forbid"
        schema["additionalProperties"] = {"type": "null"} if is_strict else True
        hints: JsonSchemaValue = {name: {} for name in sorted(cls.hints)}
        schema["properties"] = schema.get("properties", {}) | hints
        return schema


class History(Wire):
    """Base of what a client sends back as it holds it: fields that are not needed are left out."""

    model_config = ConfigDict(extra="ignore")


@functools.cache
def field_names(model: type[BaseModel]) -> frozenset[str]:
    """The names of a model's fields as JSON has them."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def in_our_names(value: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """``value`` with the fields in ``names`` as they are called here.

    Raises where a field has another value under another name: some clients send all names at once.
    """
    if names.keys().isdisjoint(value):
        return value
    found = {name: item for name, item in value.items() if name not in names}
    for theirs, ours in names.items():
        item = value.get(theirs)
        if item is None:
            continue
        if found.get(ours) is not None and not _same(found[ours], item):
            raise field_error(theirs, f"is another name for {ours}, which has another value")
        found[ours] = item
    return found


def known_alone(
    model: type[BaseModel],
    value: Mapping[str, Any],
    refused: Mapping[str, Refusal],
    hints: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """``value`` without fields that ask for nothing; raises at the first other unknown one."""
    known, is_strict = field_names(model), model.model_config.get("extra") == "forbid"
    kept: dict[str, Any] = {}
    for name, item in value.items():
        if name in known:
            kept[name] = item
        elif name in refused:
            if not refused[name].accepts(item):
                raise field_error(name, refused[name].message)
        elif is_strict and item is not None and name not in hints:
            raise field_error(name, "there is no such field")
    return kept


def field_error(name: str, message: str) -> PydanticCustomError:
    """That the value of the field ``name`` is at fault."""
    return PydanticCustomError(FIELD_ERROR, "{message}", {"message": message, "field": name})


def of_type(wanted: str, value: object, message: str) -> object:
    """``value``; raises with ``message`` about its ``type`` where that is another text."""
    kind = value.get("type") if isinstance(value, dict) else wanted
    if isinstance(kind, str) and kind != wanted:
        shown = message.format(repr(kind[:64]))
        raise PydanticCustomError("other_type", "{message}", {"message": shown})
    return value


# -------------------------------------------------------------------------------------------------
# What a client may call things: every name that ends in a store or a log is text without controls.
#
# PostgreSQL stores no NUL in a text, and a line break in a name would begin a line of a log.
# Lone surrogates are not Unicode text: the JSON parser refuses them before this.


#: C0, DEL, C1 and surrogates.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
#: The same for those who read our documents; a surrogate cannot be written in them.
PATTERN = "^[^\\u0000-\\u001f\\u007f-\\u009f]*$"

MAX_EPOCH_CHARS = 64
STATE_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"

REFUSAL = "must not have control characters"


def has_control(text: str) -> bool:
    """Whether ``text`` cannot be a name, nor a part of a path."""
    return _CONTROL.search(text) is not None


def _checked(text: str) -> str:
    if has_control(text):
        raise PydanticCustomError("control_characters", REFUSAL)
    return text


_NO_CONTROLS = AfterValidator(_checked)
_SHOWN = Field(json_schema_extra={"pattern": PATTERN})

RequestId = Annotated[str, StringConstraints(min_length=1, max_length=64), _NO_CONTROLS, _SHOWN]
SessionId = Annotated[str, StringConstraints(min_length=1, max_length=64), _NO_CONTROLS, _SHOWN]
Epoch = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_EPOCH_CHARS), _NO_CONTROLS, _SHOWN
]
IdempotencyKey = Annotated[
    str, StringConstraints(min_length=1, max_length=128), _NO_CONTROLS, _SHOWN
]
#: Of a response, an item of one, or a call.
ItemId = Annotated[str, StringConstraints(min_length=1, max_length=128), _NO_CONTROLS, _SHOWN]
#: Of a prompt that was read: see `server.engine.prefixes`.
PrefixName = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_HANDLE_CHARS), _NO_CONTROLS, _SHOWN
]
#: Of a named state: it is the name of a file, too.
StateName = Annotated[str, StringConstraints(pattern=f"^{STATE_NAME}$")]
ModelName = Annotated[str, StringConstraints(max_length=256), _NO_CONTROLS, _SHOWN]
#: A client's own word for something, which means nothing here.
Label = Annotated[str, StringConstraints(max_length=256), _NO_CONTROLS, _SHOWN]
ModelPath = Annotated[str, StringConstraints(min_length=1, max_length=1024), _NO_CONTROLS, _SHOWN]


# -------------------------------------------------------------------------------------------------
# What may come in a query: text, and apart from that as strict as a body.


MAX_LISTED = 1000
#: Tokens of an answer that shows a session's text.
MAX_TEXT_TOKENS = 16_384


def _digits(value: object) -> object:
    """Pydantic would take ``" 1_0.0 "`` for 10."""
    if isinstance(value, str) and not (value.isascii() and value.isdigit() and len(value) <= 16):
        raise ValueError("must be an integer in decimal digits")
    return value


def _flag(value: object) -> object:
    """Pydantic would take ``"off"`` for false."""
    if isinstance(value, str) and value not in ("true", "false"):
        raise ValueError("must be true or false")
    return value


Flag = Annotated[bool, BeforeValidator(_flag)]
Limit = Annotated[int, Field(ge=1, le=MAX_LISTED), BeforeValidator(_digits)]
TextTokens = Annotated[int, Field(ge=1, le=MAX_TEXT_TOKENS), BeforeValidator(_digits)]
Seq = Annotated[int, Field(ge=0, le=2**53), BeforeValidator(_digits)]


class Query(BaseModel):
    """Base of all queries."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ListQuery(Query):
    """`GET /v1/sessions`: at most ``limit`` sessions, those after the one called ``after``."""

    after: Label | SkipJsonSchema[None] = None
    limit: Limit = 100


class TextQuery(Query):
    """`GET /v1/sessions/{id}/text`: at most ``max_tokens`` tokens from number ``start`` on."""

    start: Seq | SkipJsonSchema[None] = None
    max_tokens: TextTokens = MAX_TEXT_TOKENS


class EventsQuery(Query):
    """`GET /v1/sessions/{id}/events`: those after ``starting_after`` of ``epoch``."""

    starting_after: Seq | SkipJsonSchema[None] = None
    epoch: Epoch | SkipJsonSchema[None] = None
    take_over: Flag = False


class StreamQuery(Query):
    """`GET /v1/sessions/{id}/stream`: the parameters of the Durable Streams protocol, and two more.

    The protocol wants those that are unknown to be ignored. With ``turn``, an offset, there is
    only what the session generates next from there on.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    offset: Label | SkipJsonSchema[None] = None
    live: Literal["long-poll", "sse"] | SkipJsonSchema[None] = None
    cursor: Seq | SkipJsonSchema[None] = None
    format: Literal["events", "text", "ai-sdk", "ag-ui"] = "events"
    turn: Label | SkipJsonSchema[None] = None


# -------------------------------------------------------------------------------------------------
# Bytes to the wire's models, looked at once: errors name the field and never repeat its value.
#
# The JSON is parsed before pydantic sees it, because pydantic would report a
# hundred thousand wrong fields one by one. Its own strictness is that of Python
# values; what that calls a list or a dictionary is told to the client as JSON does.

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
