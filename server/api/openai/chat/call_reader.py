"""Reads calls of functions from an answer as it comes, in any form of `model.chat.call_forms`."""

from __future__ import annotations

import json
from collections.abc import Callable, Set
from dataclasses import dataclass

from model.chat.call_forms import TAGGED, CallForm
from server.api.openai.chat.python_reader import PythonReader


@dataclass(frozen=True, slots=True)
class Text:
    """More of an answer that is not a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of the function ``name``, the ``index``-th of the answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the ``index``-th call's arguments."""

    index: int
    text: str


Piece = Text | CallBegins | Arguments


class CallReader:
    """Reads one answer as it comes. What cannot be told yet is held back.

    Of an answer that was cut short, the last call's arguments are cut as well.
    """

    def __init__(self, form: CallForm = TAGGED) -> None:
        self._form = form
        self._held = ""
        self._read: Callable[[list[Piece]], bool] = self._begin
        self._num_calls = 0
        # Of the call and of the parameter that are being read, where each is written by itself.
        self._texts: Set[str] = frozenset()
        self._num_parameters = self._num_skipped = 0
        self._is_text = False
        self._python = PythonReader()
        #: Whether all of the answer was calls, the last one complete.
        self.is_complete = False

    def push(self, text: str) -> list[Piece]:
        """What ``text`` adds."""
        self._held += text
        pieces: list[Piece] = []
        while self._read(pieces):
            pass
        return pieces

    def end(self, is_whole: bool) -> list[Piece]:
        """What was held back and is not a call after all: only of an answer that was not cut."""
        was_undecided = self._read == self._begin
        return [Text(self._held)] if is_whole and was_undecided and self._held else []

    def _begin(self, pieces: list[Piece]) -> bool:
        """Before the first call, or any text."""
        begin = self._form.opening + self._form.begin
        if self._held.startswith(begin):
            self._read_after(begin, self._name)
            return True
        if not begin.startswith(self._held):
            self._read = self._text
            return True
        return False

    def _text(self, pieces: list[Piece]) -> bool:
        if self._held:
            pieces.append(Text(self._held))
            self._held = ""
        return False

    def _name(self, pieces: list[Piece]) -> bool:
        name, found, rest = self._held.partition(self._form.middle)
        if not found:
            return False
        pieces.append(CallBegins(self._num_calls, name))
        self._num_calls += 1
        self._texts, self._num_parameters = self._form.texts.get(name, frozenset()), 0
        self._held, self._python = rest, PythonReader()
        if self._form.is_python:
            self._read = self._keywords
        else:
            self._read = self._arguments if self._form.parameter is None else self._parameter
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        """JSON, which cannot hold what a call ends with: there is a line break in it."""
        text, is_over = self._taken_until(self._form.end)
        self._add(pieces, text)
        if is_over:
            self._end_call()
        return is_over

    def _keywords(self, pieces: list[Piece]) -> bool:
        """Those of a call in Python's syntax, which a bracket outside of texts ends."""
        self._add(pieces, self._python.push(self._held))
        self._held = self._python.rest if self._python.is_over else ""
        if self._python.is_over:
            self._end_call()
        return self._python.is_over

    def _parameter(self, pieces: list[Piece]) -> bool:
        """Before a parameter, or the end of the call."""
        form, end = self._form.parameter, self._form.end
        assert form is not None
        if self._held.startswith(end):
            self._add(pieces, "}" if self._num_parameters else "{}")
            self._held = self._held.removeprefix(end)
            self._end_call()
            return True
        head, found, rest = self._held.partition(form.middle)
        if not found or not head.startswith(form.begin):
            return False
        name = head.removeprefix(form.begin)
        self._is_text = name in self._texts
        lead = ", " if self._num_parameters else "{"
        quote = '"' if self._is_text else ""
        self._add(pieces, f"{lead}{json.dumps(name, ensure_ascii=False)}: {quote}")
        self._num_parameters += 1
        self._held, self._read, self._num_skipped = rest, self._value, 1
        return True

    def _value(self, pieces: list[Piece]) -> bool:
        """Of a parameter, with the line break before it, which an empty text may share."""
        assert self._form.parameter is not None
        text, is_over = self._taken_until(self._form.parameter.end)
        if text:
            text, self._num_skipped = text[self._num_skipped :], 0
        if self._is_text:
            text = json.dumps(text, ensure_ascii=False)[1:-1]
        self._add(pieces, text + ('"' if is_over and self._is_text else ""))
        if is_over:
            self._read = self._parameter
        return is_over

    def _end_call(self) -> None:
        self._read, self.is_complete = self._between, not self._form.closing

    def _between(self, pieces: list[Piece]) -> bool:
        """Behind a call: another one, or the end of all."""
        begin, closing = self._form.between + self._form.begin, self._form.closing
        if self._held:
            self.is_complete = self._held == closing
        if self._held.startswith(begin):
            self._read_after(begin, self._name)
            return True
        return False

    def _taken_until(self, end: str) -> tuple[str, bool]:
        """Takes what is held before ``end``, and ``end`` if it is there: the text, and whether."""
        text, found, rest = self._held.partition(end)
        if not found:
            sizes = range(min(len(end) - 1, len(text)), 0, -1)
            keep = next((size for size in sizes if text.endswith(end[:size])), 0)
            text, rest = text[: len(text) - keep], text[len(text) - keep :]
        self._held = rest
        return text, bool(found)

    def _add(self, pieces: list[Piece], text: str) -> None:
        """More of the arguments."""
        if text:
            pieces.append(Arguments(self._num_calls - 1, text))

    def _read_after(self, after: str, read: Callable[[list[Piece]], bool]) -> None:
        self._held, self._read = self._held.removeprefix(after), read
