"""The base of all that comes over the wire: no unknown fields, no coercion, no NaN.

A field that is unknown, or refused with a reason, is accepted where its value asks
for nothing: null, or the default.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

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
    `server.api.openai.unsupported`. ``hints`` have no effect here, whatever they say.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    refused: ClassVar[Mapping[str, Refusal]] = {}
    hints: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _known_alone(cls, value: object) -> object:
        """Stops at the first unknown field: there may be a hundred thousand."""
        if not isinstance(value, dict) or field_names(cls).issuperset(value):
            return value
        return known_alone(cls, value, cls.refused, cls.hints)

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
