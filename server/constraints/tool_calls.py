"""Answers that call functions: the one format that no client asks for by its name.

A call is written as the models know it that were taught to call (Hermes, Qwen and
others)::

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Arguments are JSON of the function's own schema. Where the model may also answer
without a call, its answer is any text that does not begin as a call does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from server.constraints import json_schema
from server.constraints.errors import FormatRefused

BEGIN = '<tool_call>\n{"name": "'
MIDDLE = '", "arguments": '
END = "}\n</tool_call>"
BETWEEN = "\n"

#: Before the first of these characters differs, an answer may become a call.
MARKER = "<tool_call>"

_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT = {"type": "object"}


def lark(format: Mapping[str, Any]) -> str:
    """The grammar of ``format``. Raises `FormatRefused` with the name of a function and a keyword.

    ``functions`` have a name of letters, digits, _ and -, and a schema; there may be
    up to ``max_calls`` calls. ``otherwise`` is None where there must be a call; else
    what the answer may be instead, a format of its own: text, json_object or json_schema.
    """
    functions = format["functions"]
    more = format["max_calls"] - 1
    start = "calls" if format["otherwise"] is None else "calls | answer"
    lines = [
        f"start: {start}",
        f"calls: call ({_quoted(BETWEEN)} call){{0,{more}}}" if more else "calls: call",
        "call: " + " | ".join(f"call_{index}" for index in range(len(functions))),
    ]
    for index, function in enumerate(functions):
        head, schema = BEGIN + function["name"] + MIDDLE, _arguments(function)
        lines.append(f"call_{index}: {_quoted(head)} arguments_{index} {_quoted(END)}")
        lines.append(f"arguments_{index}: {_json(schema)}")
    if format["otherwise"] is not None:
        lines += _answer(format["otherwise"])
    return "\n".join(lines) + "\n"


def may_be_text(format: Mapping[str, Any]) -> bool:
    """Whether ``format``, of any type, is that of calls with any text instead."""
    return (
        format["type"] == "tool_calls"
        and format["otherwise"] is not None
        and format["otherwise"]["type"] == "text"
    )


def _answer(otherwise: Mapping[str, Any]) -> list[str]:
    match otherwise["type"]:
        case "text":
            return ["answer: TEXT", rf"TEXT: /(?s:.*)/ & ~/(?s:{MARKER}.*)/"]
        case "json_object":
            return [f"answer: {_json(json_schema.normal(_ANY_OBJECT))}"]
        case "json_schema":
            return [f"answer: {_json(json_schema.normal(otherwise['json_schema']['schema']))}"]
        case other:
            raise AssertionError(f"no answer next to calls: {other!r}")


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json_schema.normal(function["schema"], closed=True)
    except FormatRefused as error:
        raise FormatRefused(f"{function['name']}: {error}") from None


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({"x-guidance": _OPTIONS, **schema})


def _quoted(text: str) -> str:
    return json.dumps(text)
