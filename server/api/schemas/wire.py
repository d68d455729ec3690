"""The base of all that comes over the wire: strict fields, names, queries."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue, SkipJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError

from server.engine.prefixes import MAX_HANDLE_CHARS

# -------------------------------------------------------------------------------------------------
# The base of all that comes over the wire: no unknown fields, no coercion, no NaN.
#
# A field that is unknown, or refused with a reason, is accepted where its value asks
# for nothing: null, or the default.


#: The error that names its field itself: see `server.api.schemas.parse`.
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
