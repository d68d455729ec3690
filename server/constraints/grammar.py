"""A format in llguidance's grammar text, together with what its endings cost.

The text says all that a matcher needs, in any process and after any restart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llguidance import regex_to_lark

from server.constraints import json_schema, tool_calls
from server.constraints.ending import GrammarEndings
from server.constraints.errors import FormatRefused
from server.constraints.vocabulary import Vocabulary

# What a grammar leaves no choice about is drawn token by token like the rest: forced, it
# would be followed to its end at once, and a million characters take a second.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'

_JSON_OBJECT = {"type": "object"}
_JSON_OPTIONS = {"whitespace_flexible": False}

MAX_MESSAGE_CHARS = 300

_NOT_ENDING = (
    "is too large or too deep: no end of its text was found in the time that a request has for it"
)


class Costs(NamedTuple):
    """``ending``: the tokens of a short text; ``jump``: by how many one token lengthens it."""

    ending: tuple[int, ...]
    jump: int


#: The key of the marker that no free text begins with, where an answer may be one.
_MARKER = "marker"


def grammar_text(format: Mapping[str, Any]) -> str:
    """The form in llguidance of a format other than ``text``, unchecked. Raises `FormatRefused`."""
    match format["type"]:
        case "json_object":
            lark = _from_schema(_JSON_OBJECT)
        case "json_schema":
            lark = _from_schema(format["json_schema"]["schema"])
        case "regex":
            lark = _from_regex(format["regex"])
        case "choice":
            lark = _from_regex("|".join(map(_literal, format["choices"])))
        case "grammar":
            lark = _checked_lark(format["grammar"])
        case "tool_calls":
            lark = tool_calls.lark(format)
        case other:
            raise AssertionError(f"no format: {other!r}")
    marker = tool_calls.marker_of(format)
    head = {} if marker is None else {_MARKER: marker}
    return json.dumps({**head, "grammars": [{"lark_grammar": _NO_FORCING + lark}]})


def with_costs(text: str, vocabulary: Vocabulary, functions: Sequence[str] = ()) -> str:
    """``text`` with its costs, after a try. Raises `FormatRefused` where it cannot be followed.

    That names the one of ``functions``, those of `tool_calls`, at whose arguments it was found.
    """
    start = vocabulary.matcher(text)
    if start.is_error():
        raise _refused(start.get_error(), text, functions)
    for warning in start.get_grammar_warnings():
        raise _refused(warning, text, functions)
    start.compute_bitmask()
    if start.is_error():
        raise _refused(start.get_error(), text, functions)
    endings = GrammarEndings(vocabulary)
    ending = endings.shortest(start)
    jump = None if ending is None else endings.survey(start, ending)
    if ending is None or jump is None:
        raise FormatRefused(_NOT_ENDING)
    return json.dumps({"costs": Costs(ending, jump), **json.loads(text)})


def costs_of(grammar: str) -> Costs:
    """What `with_costs` put in."""
    ending, jump = json.loads(grammar)["costs"]
    return Costs(tuple(ending), jump)


def marker_of(grammar: str) -> str | None:
    """What no free text begins with; None where no free text may come."""
    marker: str | None = json.loads(grammar).get(_MARKER)
    return marker


def _from_schema(schema: Mapping[str, Any]) -> str:
    schema = {**json_schema.normal(schema), "x-guidance": _JSON_OPTIONS}
    return f"start: %json {json.dumps(schema)}"


def _from_regex(regex: str) -> str:
    return f"start: /{regex_to_lark(regex, '')}/"


def _literal(text: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else f"\\x{{{ord(c):X}}}" for c in text)


#: What must not hide a directive: strings, regular expressions and comments.
_OPAQUE = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
_NOT_IN_LARK = {
    r"%(json|lark|regex|llguidance)\b": "%{} inside a grammar is not supported",
    r"<\s*(\[|\||[A-Za-z_/])": "special tokens, <...>, are not supported",
    r"(?<![\w\"])@(\w+)": "references to other grammars, @{}, are not supported",
    r"\b(temperature|max_tokens|stop|stop_capture|capture)\b\s*[=\],]": "[{}] is not supported",
}


def _checked_lark(grammar: str) -> str:
    bare = _OPAQUE.sub('""', grammar)
    for pattern, reason in _NOT_IN_LARK.items():
        if found := re.search(pattern, bare):
            raise FormatRefused("grammar: " + reason.format(found[1]))
    return grammar


#: Where an error of llguidance's is in the grammar, from 1 on.
_LINE = re.compile(r"at (\d+)\(")
#: What begins the rules of a function's arguments: see `tool_calls`.
_OF_ARGUMENTS = re.compile(r"arguments_(\d+)")


def _refused(message: str, text: str, functions: Sequence[str]) -> FormatRefused:
    """What llguidance says of ``text``, and of which function."""
    plain = _plain(message)
    if functions and (at := _LINE.match(message)):
        lines = json.loads(text)["grammars"][0]["lark_grammar"].split("\n")
        if rule := _OF_ARGUMENTS.match(lines[int(at[1]) - 1]):
            plain = f"{functions[int(rule[1])]}: {plain}"
    return FormatRefused(plain)


_PLACE = re.compile(r"^(at )?\d+\(\d+\): |<non-verbose/>| \d+ \| .*$")


def _plain(message: str) -> str:
    """An error of llguidance's in one line, without the grammar that it shows."""
    if "oneOf constraints" in message:
        return "oneOf: only alternatives of which no two can hold at once are supported; use anyOf"
    if message.startswith("NoExtension"):
        return "no text is allowed"
    lines = message.split("<state>")[0].split("<grammar>")[0].splitlines()
    line = _PLACE.sub("", " ".join(" ".join(lines).split()))
    return line if len(line) <= MAX_MESSAGE_CHARS else line[: MAX_MESSAGE_CHARS - 3] + "..."
