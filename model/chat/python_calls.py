"""Calls as a list in Python's syntax: `call_forms.LISTED`, as templates and grammars write it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from model.chat.call_forms import LISTED


def written(calls: Iterable[Mapping[str, Any]]) -> str:
    """``calls``, as templates read them, in one list. Arguments that are no object stay as text."""
    each = (_call(call["function"]) for call in calls)
    return LISTED.opening + LISTED.between.join(each) + LISTED.closing


def _call(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    if isinstance(arguments, Mapping):
        arguments = ", ".join(f"{name}={literal(value)}" for name, value in arguments.items())
    return f"{function['name']}({arguments})"


def literal(value: object) -> str:
    """Python's literal of ``value``, parsed from JSON; a text as JSON has it."""
    match value:
        case None | True | False:
            return repr(value)
        case dict():
            pairs = (f"{literal(name)}: {literal(item)}" for name, item in value.items())
            return f"{{{', '.join(pairs)}}}"
        case list():
            return f"[{', '.join(map(literal, value))}]"
        case _:
            return json.dumps(value, ensure_ascii=False)
