"""The grammar of keyword arguments in Python's syntax, ``name=value, name=value``.

Numbers and texts in double quotes are JSON, as llguidance writes it by their schema, with all its
keywords: such JSON is Python too. So is what is made of them alone. Around a value that may be
``True``, ``False`` or ``None`` the lists and dictionaries are rules of their own here, by fewer
keywords.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from model.chat.python_calls import literal
from server.constraints import json_schema, tool_parameters
from server.constraints.errors import FormatRefused
from server.constraints.exclusive import KINDS
from server.constraints.tool_parameters import json_rule, regex_of

Schema = Mapping[str, Any]

_DEFINITIONS = frozenset(("$defs", "definitions"))
#: What `json_schema.normal` makes of a schema that no value is of.
_NOTHING: Schema = {"enum": []}
#: Keywords of lists and of dictionaries that have rules here, and of all other types together.
_OF_ARRAY = frozenset(("items", "prefixItems", "minItems", "maxItems"))
_OF_OBJECT = frozenset(("properties", "required", "additionalProperties"))
_OF_NUMBER = frozenset((*json_schema.BOUNDS, "multipleOf"))
_OF_TEXT = frozenset(("minLength", "maxLength", "pattern", "format"))
_KNOWN = _OF_ARRAY | _OF_OBJECT | _OF_NUMBER | _OF_TEXT | {"type"}
_SCHEMAS = ("items", "additionalProperties")


def lark(rule: str, schema: Schema) -> list[str]:
    """``rule`` for all arguments by ``schema``, an object's, and the rules that it needs.

    Those in ``properties`` come in that order, and no others. Raises `FormatRefused`.
    """
    root = json_schema.normal(schema, closed=True)
    names, required = tool_parameters.listed(schema)
    values = _Values(rule, root)
    found = values.resolved(_own(root))
    parts = []
    for name in names:
        if not name.isidentifier():
            raise FormatRefused(f"properties: {name!r} cannot be written in the model's calls")
        value = values.rule(found["properties"][name])
        parts.append((f'"{name}=" {value}', name in required))
    return [f"{rule}: {values.in_order(parts)}", *values.lines]


class _Values:
    """Rules for values by the schemas of one document, ``root``, as `json_schema.normal` gives it.

    Their names begin with ``prefix``.
    """

    def __init__(self, prefix: str, root: Schema) -> None:
        self._prefix, self._root = prefix, root
        self._names: dict[str, str] = {}
        self._num_rules = 0
        self.lines: list[str] = []

    def rule(self, schema: Schema) -> str:
        """The name of the rule for values of ``schema``; schemas that refer to themselves end."""
        key = json.dumps(schema)
        if key not in self._names:
            self._names[key] = name = self._new_name()
            self.lines.append(f"{name}: {self._value(schema)}")
        return self._names[key]

    def resolved(self, schema: Schema) -> Schema:
        """What ``schema`` refers to, or itself."""
        met = set()
        while (ref := schema.get("$ref")) is not None:
            if schema.keys() != {"$ref"} or ref in met:
                raise FormatRefused("$ref: must be alone, and lead to a schema, in these calls")
            met.add(ref)
            schema = self._root
            for step in ref.split("/")[1:]:
                inside: Any = schema
                schema = inside[int(step) if isinstance(inside, list) else step]
        return _own(schema) if met else schema

    def in_order(self, parts: Sequence[tuple[str, bool]], more: str | None = None) -> str:
        """``parts`` with commas between them; of each, whether it must come; then any ``more``."""
        tail = f'(", " {more})*' if more else '""'
        heads = [f"{more} {tail}"] if more else []
        must = False
        for part, is_required in reversed(parts):
            if is_required:
                heads.clear()
            must = must or is_required
            heads.append(f"{part} {tail}")
            tail = self._named(f'", " {part} {tail}' if is_required else f'(", " {part})? {tail}')
        return " | ".join(heads if must else [*heads, '""'])

    def _new_name(self) -> str:
        self._num_rules += 1
        return f"{self._prefix}_{self._num_rules}"

    def _named(self, text: str) -> str:
        name = self._new_name()
        self.lines.append(f"{name}: {text}")
        return name

    def _value(self, schema: Schema) -> str:
        if "$ref" in schema:
            return self.rule(self.resolved(schema))
        if _is_json(schema):
            return json_rule(schema)
        types = schema.get("type", json_schema.TYPES)
        types = (types,) if isinstance(types, str) else types
        if "enum" in schema or "const" in schema:
            _only(schema, {"type", "enum" if "enum" in schema else "const"})
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            kept = [value for value in values if any(_is_of(value, name) for name in types)]
            return " | ".join(json.dumps(literal(value)) for value in kept) or json_rule(_NOTHING)
        if "anyOf" in schema:
            _only(schema, {"anyOf"})
            return " | ".join(map(self.rule, schema["anyOf"]))
        _only(schema, _KNOWN)
        return " | ".join(self._of_type(name, schema) for name in types)

    def _of_type(self, type: str, schema: Schema) -> str:
        match type:
            case "null":
                return '"None"'
            case "boolean":
                return '"True" | "False"'
            case "array":
                return self._named(f'"[" {self._items(schema)} "]"')
            case "object":
                return self._named(f'"{{" ({self._pairs(schema)}) "}}"')
            case _:
                own = _OF_TEXT if type == "string" else _OF_NUMBER
                said = {key: value for key, value in schema.items() if key in own}
                return self._named(json_rule({"type": type, **said}))

    def _items(self, schema: Schema) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        items = schema.get("items", {})
        first = [self.rule(item) for item in schema.get("prefixItems", [])][:most]
        rest = most if most is None else most - len(first)
        if items == _NOTHING or rest == 0:
            text = '""'
        elif first:
            text = f'(", " {self.rule(items)}){_times(least - len(first), rest)}'
        else:
            following = _times(least - 1, None if rest is None else rest - 1)
            text = f'{self.rule(items)} (", " {self.rule(items)}){following}'
            text = text if least else f"({text})?"
        for index, item in reversed(list(enumerate(first))):
            text = f"{item} {text}" if not index else f'", " {item} {text}'
            text = text if index < least else f"({text})?"
        return text

    def _pairs(self, schema: Schema) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not all(name in properties for name in required):
            raise FormatRefused("required: must be a list of names in properties")
        parts = [
            (f"{json.dumps(literal(name) + ': ')} {self.rule(value)}", name in required)
            for name, value in properties.items()
        ]
        others = schema.get("additionalProperties", {})
        if others == _NOTHING:
            return self.in_order(parts)
        key = self._new_name().upper()
        self.lines.append(f"{key}: {_other_text(properties)}")
        return self.in_order(parts, self._named(f'{key} ": " {self.rule(others)}'))


def _is_json(schema: Schema) -> bool:
    """Whether JSON of ``schema`` has none of the words that Python has others for."""
    if "$ref" in schema:
        return False
    if "enum" in schema or "const" in schema:
        return not any(map(_has_word, schema.get("enum", [schema.get("const")])))
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in schema:
            return all(map(_is_json, schema[keyword]))
    types = schema.get("type", json_schema.TYPES)
    if {"boolean", "null"} & {*((types,) if isinstance(types, str) else types)}:
        return False
    inside = [schema[key] for key in _SCHEMAS if key in schema] + schema.get("prefixItems", [])
    for key in ("properties", "patternProperties"):
        inside += schema.get(key, {}).values()
    return all(map(_is_json, inside))


def _has_word(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_word, value.values()))
    if isinstance(value, list):
        return any(map(_has_word, value))
    return value is None or isinstance(value, bool)


def _is_of(value: object, type_name: str) -> bool:
    kind = KINDS[type(value)]
    return type_name == kind or (type_name, kind) == ("integer", "number")


def _own(schema: Schema) -> Schema:
    """``schema`` without what it defines for others."""
    return {key: value for key, value in schema.items() if key not in _DEFINITIONS}


def _only(schema: Schema, known: Iterable[str]) -> None:
    if odd := schema.keys() - {*known} - _DEFINITIONS:
        raise FormatRefused(
            f"{min(odd)}: is not supported in the model's calls around true, false or null"
        )


def _other_text(names: Iterable[str]) -> str:
    """A terminal: a text in quotes that is none of ``names``, each of which has one form only."""
    named = "|".join(regex_of(literal(name)) for name in names)
    text = r'/"([^"\\\x00-\x1f]|\\["\\bfnrt])*"/'
    return f"{text} & ~/({named})/" if named else text


def _times(least: int, most: int | None) -> str:
    return f"{{{max(least, 0)},{'' if most is None else most}}}"
