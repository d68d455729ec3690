"""How models write calls of functions, as their chat templates show it.

Arguments are JSON of the function's own schema, on one line, or one parameter after another, or
those of a call in Python's syntax. A form is used three times: by the template that tells the model
of it, by the grammar that a call is written under, and by what reads calls from an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ParameterForm:
    """An argument is ``begin``, its parameter's name, ``middle``, a line break, the value, ``end``.

    The value is plain text without ``end`` in it, or JSON on one line. An empty text may leave out
    the line break before it.
    """

    begin: str
    middle: str
    end: str


@dataclass(frozen=True)
class CallForm:
    """A call is ``begin``, the name, ``middle``, the arguments and ``end``.

    ``end`` has a line break in it, which JSON on one line cannot have. An answer that begins with
    ``marker`` is one or more calls: ``opening``, calls with ``between`` between them, ``closing``.
    ``name`` is that in `FORMS`, which is kept with what is stored.

    The arguments are a JSON object, or each is written as ``parameter`` says. ``texts`` are then
    the names of each function's parameters whose values are plain text. With ``is_python`` they are
    keyword arguments with Python's literals, up to the bracket that is ``end``.
    """

    name: str
    marker: str
    begin: str
    middle: str
    end: str
    opening: str = ""
    between: str = "\n"
    closing: str = ""
    is_python: bool = False
    parameter: ParameterForm | None = None
    texts: Mapping[str, Set[str]] = field(default_factory=dict)


#: As Hermes, Qwen and others were taught it.
TAGGED = CallForm(
    "tool_call",
    marker="<tool_call>",
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    end="}\n</tool_call>",
)
#: As RWKV-7 G1 was taught it.
FENCED = CallForm(
    "json_fence",
    marker="```json",
    begin='```json\n{"name": "',
    middle='", "arguments": ',
    end="}\n```",
)
#: As Qwen3.5 and Qwen3-Coder were taught it.
PARAMETERS = CallForm(
    "tool_call_parameters",
    marker="<tool_call>",
    begin="<tool_call>\n<function=",
    middle=">\n",
    end="</function>\n</tool_call>",
    parameter=ParameterForm("<parameter=", ">", "\n</parameter>\n"),
)
#: As LFM2 was taught it. Its vocabulary has tokens for both ends of the list.
LISTED = CallForm(
    "python_list",
    marker="<|tool_call_start|>",
    begin="",
    middle="(",
    end=")",
    opening="<|tool_call_start|>[",
    between=", ",
    closing="]<|tool_call_end|>",
    is_python=True,
)
FORMS = {form.name: form for form in (TAGGED, FENCED, PARAMETERS, LISTED)}
#: In templates that teach calls with a function's name in a tag. Of those only one form is known.
_NAME_IN_TAG = "<function="
_PARAMETERS = re.compile(r"<tool_call>(\n|\\n)<function=[^>]*>\1<parameter=[^>]*>\1")

#: How templates of LFM2 and LFM2.5 show the tools. Most of them say nothing of calls.
_LIST_OF_TOOLS = re.compile(r"List of tools: (<\|tool_list_start\|>)?\[")


def form_in(template: str) -> CallForm | None:
    """The form that a template which shows the model its tools writes calls in, if it is known."""
    if "tools" not in template:
        return None
    if _LIST_OF_TOOLS.search(template):
        return LISTED
    if "arguments" not in template:
        return None
    if _NAME_IN_TAG in template:
        return PARAMETERS if _PARAMETERS.search(template) else None
    return next((form for form in (TAGGED, FENCED) if form.marker in template), None)


def written(calls: Iterable[Mapping[str, Any]]) -> str:
    """``calls``, as templates read them, in one list of Python's syntax (`LISTED`).

    Arguments that are no object stay as text.
    """
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
