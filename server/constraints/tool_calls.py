"""Answers that call functions: the one format that no client asks for by its name.

A call is written in one of the forms of `model.chat.call_forms`, which differ in what is around the
name and the arguments. Arguments are JSON of the function's own schema, one parameter after
another, or in Python's syntax. Where the model may also answer without a call, its answer is any
text that does not begin as a call does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from model.chat.call_forms import FORMS, CallForm
from server.constraints import json_schema, python_arguments, tool_parameters
from server.constraints.errors import FormatRefused
from server.constraints.tool_parameters import json_rule, regex_of

_ANY_OBJECT = {"type": "object"}


def lark(format: Mapping[str, Any]) -> str:
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
            return python_arguments.lark(rule, function["schema"])
        if form.parameter is not None:
            return tool_parameters.lark(rule, function["schema"], form.parameter)
        return [f"{rule}: {json_rule(json_schema.normal(function['schema'], closed=True))}"]
    except FormatRefused as error:
        raise FormatRefused(f"{function['name']}: {error}") from None


def _quoted(text: str) -> str:
    return json.dumps(text)
