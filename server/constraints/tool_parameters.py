"""Arguments of a call that are written one by one: what each is, and the grammar of all.

A parameter whose schema says no more than that it is a string, of some length or one of some
values, is plain text. All others are JSON, and so is a string with a ``pattern`` or a ``format``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from model.chat.call_forms import ParameterForm
from server.constraints import dialects, json_schema
from server.constraints.errors import FormatRefused
from server.constraints.exclusive import Exclusive

_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_DEFINITIONS = ("$defs", "definitions")
_ABOUT_DOCUMENT = frozenset(("$schema", "$id", "id", *_DEFINITIONS))
_OF_OBJECT = frozenset(("type", "properties", "required", "additionalProperties"))
_ANNOTATIONS = json_schema.ANNOTATIONS | dialects.ANNOTATIONS
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


def lark(rule: str, schema: Schema, form: ParameterForm) -> list[str]:
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
    if text.get("format") not in dialects.CHECKED | dialects.REFUSED:
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
