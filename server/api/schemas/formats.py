"""What a text must be, as a client asks for it: OpenAI's ``response_format`` and more.

Only sizes are looked at here; what a schema or a grammar means is found out by
`server.constraints`, in a process of its own.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from server.api.schemas.wire import field_names, known_alone

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_REGEX_CHARS = 4096
MAX_GRAMMAR_CHARS = 64 * 1024
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 1024
MAX_CHOICES_CHARS = 64 * 1024


#: No object of the protocol has as many fields.
MAX_FIELDS = 64


def few_fields(value: Any) -> Any:
    """``value``; raises for an object of more than `MAX_FIELDS`, before each is looked at."""
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise PydanticCustomError("too_many_fields", f"must have at most {MAX_FIELDS} fields")
    return value


def finite_numbers(value: dict[str, Any]) -> dict[str, Any]:
    """``value``; raises at the first number that is not finite, and where it is nested deeply."""
    if _depth(value, MAX_SCHEMA_DEPTH) > MAX_SCHEMA_DEPTH:
        raise PydanticCustomError("json_depth", "must have at most 64 levels")
    return value


def _schema_of_fair_size(schema: dict[str, Any]) -> dict[str, Any]:
    # Depth first: the serialiser has a bound of its own, and another error for it.
    if _depth(schema, MAX_SCHEMA_DEPTH) > MAX_SCHEMA_DEPTH:
        raise PydanticCustomError("schema_depth", "the schema is nested deeper than 64 levels")
    try:
        size = len(orjson.dumps(schema))
    except TypeError:  # an integer of more than 64 bits
        raise PydanticCustomError("schema_value", "the schema has a number out of range") from None
    if size > MAX_SCHEMA_BYTES:
        raise PydanticCustomError("schema_size", "the schema is larger than 64 KiB")
    return schema


def _depth(value: object, limit: int) -> int:
    """Levels of ``value``, at most ``limit + 1``. Raises for a number that is not finite."""
    level, depth = [value], 0
    while level and depth <= limit:
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise PydanticCustomError("schema_value", "has a number that is not finite")
        level, depth = below, depth + 1
    return depth


def _few_chars(choices: list[str]) -> list[str]:
    if sum(map(len, choices)) > MAX_CHOICES_CHARS:
        raise PydanticCustomError("choices_size", "the choices are longer than 65536 characters")
    return choices


Schema = Annotated[dict[str, Any], AfterValidator(_schema_of_fair_size)]
SchemaName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Choice = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CHOICE_CHARS)]
ChoiceList = Annotated[
    list[Choice],
    Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES),
    AfterValidator(_few_chars),
]


class FormatPart(BaseModel):
    """Base of all parts of a format: as strict as every message."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_by_name=True,
        hide_input_in_errors=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _known_alone(cls, value: object) -> object:
        names = field_names(cls) | cls.model_fields.keys()
        if not isinstance(value, dict) or names.issuperset(value):
            return value
        return known_alone(cls, value, {})


class TextFormat(FormatPart):
    """Any text: the default."""

    type: Literal["text"]


class JsonObjectFormat(FormatPart):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchema(FormatPart):
    """OpenAI's shape of a schema. It is always followed, whatever ``strict`` says."""

    name: SchemaName
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None
    description: str | None = Field(None, max_length=4096)


class JsonSchemaFormat(FormatPart):
    """JSON that a schema admits."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(FormatPart):
    """A text that matches a regular expression from its first character to its last."""

    type: Literal["regex"]
    regex: str = Field(min_length=1, max_length=MAX_REGEX_CHARS)


class GrammarFormat(FormatPart):
    """A text that a grammar in Lark's notation, as llguidance reads it, can derive."""

    type: Literal["grammar"]
    grammar: str = Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)


class ChoiceFormat(FormatPart):
    """One of some texts."""

    type: Literal["choice"]
    choices: ChoiceList


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat | ChoiceFormat,
    Field(discriminator="type"),
]
