"""Answers that call functions: their format, and the grammar of their arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from model.chat import FORMS, CallForm, ParameterForm, literal
from server.constraints import schema as json_schema
from server.constraints.schema import KINDS, Exclusive, FormatRefused

# -------------------------------------------------------------------------------------------------
# Arguments of a call that are written one by one: what each is, and the grammar of all.
#
# A parameter whose schema says no more than that it is a string, of some length or one of some
# values, is plain text. All others are JSON, and so is a string with a ``pattern`` or a ``format``.


_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_DEFINITIONS = ("$defs", "definitions")
_ABOUT_DOCUMENT = frozenset(("$schema", "$id", "id", *_DEFINITIONS))
_OF_OBJECT = frozenset(("type", "properties", "required", "additionalProperties"))
_ANNOTATIONS = json_schema.ANNOTATIONS | json_schema.OTHER_ANNOTATIONS
#: In a schema's JSON. Each value is compiled by itself, with the definitions alone.
_OTHER_REFERENCE = re.compile(r'"\$ref": "(?!#/(\$defs|definitions)/)')

#: A text that must have more characters than the first, and one with a ``minLength`` that may have
#: more than the second, are JSON: too much work for llguidance.
MAX_MIN_LENGTH, MAX_BOUND_LENGTH = 8, 200

Schema = Mapping[str, Any]


def json_rule(schema: Schema) -> str:
    """What a rule says for JSON on one line; ``schema`` is as `json_schema.normal` gives it."""
    return "%json " + json.dumps({"x-guidance": _OPTIONS, **schema})


def texts_of(schema: Schema, form: ParameterForm) -> frozenset[str]:
    """The names of the parameters in ``schema``, an object's, whose values are plain text."""
    properties = _object(schema).get("properties")
    found = properties if isinstance(properties, dict) else {}
    return frozenset(name for name, value in found.items() if _text(value, schema, form))


def parameters_lark(rule: str, schema: Schema, form: ParameterForm) -> list[str]:
    """``rule`` for all arguments by ``schema``, an object's, and the rules that it needs.

    Those in ``properties`` come in that order, and no others. Raises `FormatRefused`.
    """
    json_schema.normal(schema, closed=True)
    if _OTHER_REFERENCE.search(json.dumps(schema)):
        raise FormatRefused("$ref: only references into $defs are supported in the model's calls")
    properties, required = listed(schema)
    lines, order = [], []
    for index, (name, value) in enumerate(properties.items()):
        if re.search(rf"[\n{form.middle}]", name):
            raise FormatRefused(f"properties: {name!r} cannot be written in the model's calls")
        order.append(f"{rule}_{index}" + ("" if name in required else "?"))
        head = json.dumps(form.begin + name + form.middle)
        lines += _parameter(f"{rule}_{index}", head, value, schema, form)
    return [f"{rule}: " + (" ".join(order) or '""'), *lines]


def listed(schema: Schema) -> tuple[dict[str, Any], list[str]]:
    """The properties of ``schema``, an object's, and the names of those that are required.

    Raises `FormatRefused` where it says more of an object than that.
    """
    found = _object(schema)
    if odd := found.keys() - _OF_OBJECT:
        raise FormatRefused(f"{min(odd)}: is not supported around parameters in the model's calls")
    properties, required = found.get("properties", {}), found.get("required", [])
    if not isinstance(required, list) or not all(name in properties for name in required):
        raise FormatRefused("required: must be a list of names in properties")
    if not properties and found.get("additionalProperties"):
        raise FormatRefused("additionalProperties: needs properties in the model's calls")
    return properties, required


def _parameter(rule: str, head: str, value: object, root: Schema, form: ParameterForm) -> list[str]:
    """One parameter by the schema ``value``; ``head`` is what comes before the value."""
    text = _text(value, root, form)
    if text is None:
        return _json(rule, head, value, root, form)
    values, end = _values(text), json.dumps(form.end)
    if values is not None:
        written = " | ".join(json.dumps("\n" + value) for value in values)
        return [f"{rule}: {head} ({written}) {end}"]
    return [f"{rule}: {head} {rule}_text", *_free(f"{rule}_text", text, form)]


def _free(rule: str, text: Schema, form: ParameterForm) -> list[str]:
    """Any text of the lengths of ``text``, from the line break before it to its first end."""
    least, most = text.get("minLength", 0), text.get("maxLength", "")
    lines, end = rf"\n(?s:.{{{least},{most}}})", regex_of(form.end)
    if not least:
        return [f"{rule}[lazy]: /({lines})?{end}/"]
    too_short = rf"/(\n(?s:.{{0,{least - 1}}}))?{end}(?s:.*)/"
    terminal = rule.upper()
    return [f"{rule}[lazy]: {terminal}", f"{terminal}: /{lines}{end}/ & ~{too_short}"]


def _json(rule: str, head: str, value: object, root: Schema, form: ParameterForm) -> list[str]:
    if isinstance(value, bool):
        value = {} if value else {"enum": []}
    assert isinstance(value, dict), "seen by json_schema.normal"
    shared = {
        key: root[key] for key in _DEFINITIONS if key in root and '"$ref"' in json.dumps(value)
    }
    schema = json_schema.normal({**value, **shared}, closed=True)
    return [
        f'{rule}: {head} "\\n" {rule}_value {json.dumps(form.end)}',
        f"{rule}_value: {json_rule(schema)}",
    ]


def _text(value: object, root: Schema, form: ParameterForm) -> Schema | None:
    """What ``value`` says of a text, in ``root``; None if that is not written as plain text."""
    found = Exclusive(root).resolved(value)
    text = _meaning(found) if isinstance(found, dict) else {}
    if text.get("format") not in json_schema.CHECKED | json_schema.REFUSED:
        text.pop("format", None)
    if text.get("type", "string") != "string":
        return None
    if (values := _values(text)) is not None:
        is_alone = text.keys() - {"type"} in ({"enum"}, {"const"})
        return text if is_alone and all(_can_be_read(value, form) for value in values) else None
    if "type" not in text or text.keys() - {"type", "minLength", "maxLength"}:
        return None
    least, most = text.get("minLength", 0), text.get("maxLength", MAX_MIN_LENGTH)
    if type(least) is not int or type(most) is not int:
        return None
    is_easy = not least or most <= MAX_BOUND_LENGTH
    return text if is_easy and 0 <= least <= min(most, MAX_MIN_LENGTH) else None


def _can_be_read(value: object, form: ParameterForm) -> bool:
    """Whether ``value`` is a text that ends where its end is first seen."""
    if not isinstance(value, str):
        return False
    return f"\n{value}{form.end}".index(form.end) == len(value) + 1


def _values(text: Schema) -> list[Any] | None:
    """Those of ``enum`` or ``const``, where there are some."""
    values = text.get("enum", [text["const"]] if "const" in text else None)
    return values if isinstance(values, list) and values else None


def _object(schema: Schema) -> dict[str, Any]:
    """What ``schema``, or what it refers to, says of an object."""
    alone = {key: value for key, value in schema.items() if key not in _ABOUT_DOCUMENT}
    found = Exclusive(schema).resolved(_meaning(alone))
    return _meaning(found) if isinstance(found, dict) else {}


def _meaning(schema: Schema) -> dict[str, Any]:
    """``schema`` without annotations."""
    is_said = {key: key not in _ANNOTATIONS and not key.startswith("x-") for key in schema}
    return {key: value for key, value in schema.items() if is_said[key]}


def regex_of(text: str) -> str:
    """A regular expression of ``text`` alone."""
    return "".join(c if c.isalnum() and c.isascii() else f"\\x{{{ord(c):X}}}" for c in text)


# -------------------------------------------------------------------------------------------------
# The grammar of keyword arguments in Python's syntax, ``name=value, name=value``.
#
# Numbers and texts in double quotes are JSON, as llguidance writes it by their schema, with all its
# keywords: such JSON is Python too. So is what is made of them alone. Around a value that may be
# ``True``, ``False`` or ``None`` the lists and dictionaries are rules of their own here, by fewer
# keywords.


_ARGUMENT_DEFINITIONS = frozenset(("$defs", "definitions"))
#: What `json_schema.normal` makes of a schema that no value is of.
_NOTHING: Schema = {"enum": []}
#: Keywords of lists and of dictionaries that have rules here, and of all other types together.
_OF_ARRAY = frozenset(("items", "prefixItems", "minItems", "maxItems"))
_OF_ARGUMENTS = frozenset(("properties", "required", "additionalProperties"))
_OF_NUMBER = frozenset((*json_schema.BOUNDS, "multipleOf"))
_OF_TEXT = frozenset(("minLength", "maxLength", "pattern", "format"))
_KNOWN = _OF_ARRAY | _OF_ARGUMENTS | _OF_NUMBER | _OF_TEXT | {"type"}
_SCHEMAS = ("items", "additionalProperties")


def python_lark(rule: str, schema: Schema) -> list[str]:
    """``rule`` for all arguments by ``schema``, an object's, and the rules that it needs.

    Those in ``properties`` come in that order, and no others. Raises `FormatRefused`.
    """
    root = json_schema.normal(schema, closed=True)
    names, required = listed(schema)
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
    return {key: value for key, value in schema.items() if key not in _ARGUMENT_DEFINITIONS}


def _only(schema: Schema, known: Iterable[str]) -> None:
    if odd := schema.keys() - {*known} - _ARGUMENT_DEFINITIONS:
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


# -------------------------------------------------------------------------------------------------
# Answers that call functions: the one format that no client asks for by its name.
#
# A call is written in one of the forms of `model.chat`, which differ in what is around
# the name and the arguments. Arguments are JSON of the function's own schema, one parameter after
# another, or in Python's syntax. Where the model may also answer without a call, its answer is any
# text that does not begin as a call does.


_ANY_OBJECT = {"type": "object"}


def calls_lark(format: Mapping[str, Any]) -> str:
    """The grammar of ``format``. Raises `FormatRefused` with the name of a function and a keyword.

    ``form`` is the name of the calls' form. ``functions`` have a name of letters, digits, _ and
    -, and a schema; there may be up to ``max_calls`` calls. ``otherwise`` is None where there must
    be a call; else what the answer may be instead, a format of its own: text, json_object or
    json_schema.
    """
    functions, form = format["functions"], FORMS[format["form"]]
    more = format["max_calls"] - 1
    start = "calls" if format["otherwise"] is None else "calls | answer"
    several = f"call ({_quoted(form.between)} call){{0,{more}}}" if more else "call"
    lines = [
        f"start: {start}",
        f"calls: {_quoted(form.opening)} {several} {_quoted(form.closing)}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(functions))),
    ]
    for index, function in enumerate(functions):
        head = form.begin + function["name"] + form.middle
        lines.append(f"call_{index}: {_quoted(head)} arguments_{index} {_quoted(form.end)}")
        lines += _arguments(f"arguments_{index}", function, form)
    if format["otherwise"] is not None:
        lines += _answer(format["otherwise"], form.marker)
    return "\n".join(lines) + "\n"


def marker_of(format: Mapping[str, Any]) -> str | None:
    """What a text does not begin with in ``format``, of any type; None but for calls or any text.

    Before the first of its characters differs, an answer may become a call.
    """
    if format["type"] != "tool_calls" or format["otherwise"] is None:
        return None
    return FORMS[format["form"]].marker if format["otherwise"]["type"] == "text" else None


def _answer(otherwise: Mapping[str, Any], marker: str) -> list[str]:
    match otherwise["type"]:
        case "text":
            return ["answer: TEXT", rf"TEXT: /(?s:.*)/ & ~/(?s:{regex_of(marker)}.*)/"]
        case "json_object":
            return [f"answer: {json_rule(json_schema.normal(_ANY_OBJECT))}"]
        case "json_schema":
            return [f"answer: {json_rule(json_schema.normal(otherwise['json_schema']['schema']))}"]
        case other:
            raise AssertionError(f"no answer next to calls: {other!r}")


def _arguments(rule: str, function: Mapping[str, Any], form: CallForm) -> list[str]:
    try:
        if form.is_python:
            return python_lark(rule, function["schema"])
        if form.parameter is not None:
            return parameters_lark(rule, function["schema"], form.parameter)
        return [f"{rule}: {json_rule(json_schema.normal(function['schema'], closed=True))}"]
    except FormatRefused as error:
        raise FormatRefused(f"{function['name']}: {error}") from None


def _quoted(text: str) -> str:
    return json.dumps(text)
