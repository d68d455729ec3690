"""Reads keyword arguments in Python's syntax as they come, and gives them as JSON.

They are those that `server.constraints.python_arguments` allows: texts in double quotes with the
escapes of JSON, so that nothing but names and the words for true, false and none differs from it.
"""

from __future__ import annotations

import json
import re

WORDS = {"True": "true", "False": "false", "None": "null"}

_IN_TEXT = re.compile(r'(?:[^"\\]|\\.)+', re.DOTALL)
_WORD = re.compile(r"[A-Za-z]+")
_OTHER = re.compile(r'[^"A-Za-z()\[\]{},]+')


class PythonReader:
    """Reads what is between the brackets of one call."""

    def __init__(self) -> None:
        self._held = ""
        self._num_arguments = self._depth = 0
        self._in_name, self._in_text = True, False
        #: Whether the bracket that ends the call was read.
        self.is_over = False

    def push(self, text: str) -> str:
        """The JSON that ``text`` adds."""
        self._held += text
        written = []
        while not self.is_over and self._held and (piece := self._next()) is not None:
            written.append(piece)
        return "".join(written)

    @property
    def rest(self) -> str:
        """What was pushed and is not read yet; behind the call where that is over."""
        return self._held

    def _next(self) -> str | None:
        """A piece of JSON; None where more must come first."""
        if self._in_name:
            return self._name()
        return self._text() if self._in_text else self._value()

    def _name(self) -> str | None:
        if self._held[0] == ")":
            return self._end()
        name, found, rest = self._held.lstrip(" ").partition("=")
        if not found:
            return None
        self._held, self._in_name = rest, False
        self._num_arguments += 1
        lead = ", " if self._num_arguments > 1 else "{"
        return f"{lead}{json.dumps(name, ensure_ascii=False)}: "

    def _text(self) -> str | None:
        if self._held[0] == '"':
            self._in_text = False
            return self._taken(1)
        found = _IN_TEXT.match(self._held)
        return None if found is None else self._taken(found.end())

    def _value(self) -> str | None:
        first = self._held[0]
        if first == ")":
            return self._end()
        if first == "," and not self._depth:
            self._held, self._in_name = self._held[1:], True
            return ""
        if first == '"':
            self._in_text = True
        self._depth += (first in "[{") - (first in "]}")
        if (word := _WORD.match(self._held)) is not None:
            if word.end() == len(self._held):
                return None
            self._taken(word.end())
            return WORDS.get(word[0], word[0])
        other = _OTHER.match(self._held)
        return self._taken(1 if other is None else other.end())

    def _end(self) -> str:
        self.is_over, self._held = True, self._held[1:]
        return "}" if self._num_arguments else "{}"

    def _taken(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken
