"""The output items of a response, and the events that make them, from the model's text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from server.api.openai.chat.tools import Arguments, CallBegins, CallReader, Piece, Text
from server.api.openai.logprobs import JsonList
from server.api.openai.responses.note import Json, Note

#: Takes the type of an event and what makes its fields, if anybody wants it.
Emit = Callable[[str, Callable[[], Json]], None]

#: Pieces of text that are kept before they are joined.
MAX_PIECES = 512


@dataclass(slots=True)
class Message:
    """A message of the assistant's while it is written."""

    id: str
    index: int
    emit: Emit
    is_told: bool  # whether anybody wants the events
    status: str = "in_progress"
    _texts: list[str] = field(default_factory=list)
    _logprobs: JsonList = field(default_factory=JsonList)
    _shown: JsonList = field(default_factory=JsonList)

    def begin(self) -> None:
        item = {**self.item(), "content": []}
        self.emit("response.output_item.added", lambda: {"output_index": self.index, "item": item})
        part = _part("", [])
        self.emit("response.content_part.added", lambda: {**self._place, "part": part})

    def push(self, text: str, logprobs: list[Json]) -> None:
        self._texts.append(text)
        if len(self._texts) == MAX_PIECES:
            self._texts = ["".join(self._texts)]
        self._logprobs.add(logprobs)
        shown = [_without_bytes(entry) for entry in logprobs] if self.is_told else []
        self._shown.add(shown)
        self.emit(
            "response.output_text.delta",
            lambda: {**self._place, "delta": text, "logprobs": shown},
        )

    def end(self, status: str) -> None:
        self.status = status
        if not self.is_told:
            return
        item = self.item()
        part = item["content"][0]
        done = {**self._place, "text": part["text"], "logprobs": self._shown.json()}
        self.emit("response.output_text.done", lambda: done)
        self.emit("response.content_part.done", lambda: {**self._place, "part": part})
        self.emit("response.output_item.done", lambda: {"output_index": self.index, "item": item})

    def item(self) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "status": self.status,
            "role": "assistant",
            "content": [_part("".join(self._texts), self._logprobs.json())],
        }

    @property
    def _place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}


@dataclass(slots=True)
class ReasoningItem:
    """What the model thinks before it answers, while it is written."""

    id: str
    index: int
    emit: Emit
    status: str = "in_progress"
    _texts: list[str] = field(default_factory=list)

    def begin(self) -> None:
        item = {**self.item(), "content": []}
        self.emit("response.output_item.added", lambda: {"output_index": self.index, "item": item})
        part = {"type": "reasoning_text", "text": ""}
        self.emit("response.content_part.added", lambda: {**self._place, "part": part})

    def push(self, text: str) -> None:
        self._texts.append(text)
        if len(self._texts) == MAX_PIECES:
            self._texts = ["".join(self._texts)]
        self.emit("response.reasoning_text.delta", lambda: {**self._place, "delta": text})

    def end(self, status: str) -> None:
        self.status = status
        item = self.item()
        (part,) = item["content"]
        text = part["text"]
        self.emit("response.reasoning_text.done", lambda: {**self._place, "text": text})
        self.emit("response.content_part.done", lambda: {**self._place, "part": part})
        self.emit("response.output_item.done", lambda: {"output_index": self.index, "item": item})

    def item(self) -> Json:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": self.status,
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "".join(self._texts)}],
        }

    @property
    def _place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}


@dataclass(slots=True)
class FunctionCall:
    """A call of one of the client's functions while it is written."""

    id: str
    call_id: str
    name: str
    index: int
    emit: Emit
    status: str = "in_progress"
    _arguments: list[str] = field(default_factory=list)

    def begin(self) -> None:
        self.emit(
            "response.output_item.added",
            lambda: {"output_index": self.index, "item": self.item()},
        )

    def push(self, arguments: str) -> None:
        self._arguments.append(arguments)
        self.emit(
            "response.function_call_arguments.delta",
            lambda: {**self._place, "delta": arguments},
        )

    def end(self, status: str) -> None:
        self.status = status
        item = self.item()
        done = {**self._place, "name": self.name, "arguments": item["arguments"]}
        self.emit("response.function_call_arguments.done", lambda: done)
        self.emit("response.output_item.done", lambda: {"output_index": self.index, "item": item})

    def item(self) -> Json:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": "".join(self._arguments),
        }

    @property
    def _place(self) -> Json:
        return {"item_id": self.id, "output_index": self.index}


Item = Message | ReasoningItem | FunctionCall


class Output:
    """All items of one response, in order; at most the last is being written."""

    def __init__(self, note: Note, emit: Emit, is_told: bool = True) -> None:
        self._note, self._emit, self._is_told = note, emit, is_told
        self._calls = CallReader() if note.may_call else None
        self._items: list[Item] = []
        self._unshown: list[Json] = []

    def think(self, text: str) -> None:
        """More of what the model thinks before its answer."""
        thinking = self._writing
        if not isinstance(thinking, ReasoningItem):
            index = len(self._items)
            thinking = ReasoningItem(self._note.item_id("rs", index), index, self._emit)
            self._items.append(thinking)
            thinking.begin()
        thinking.push(text)

    def push(self, text: str, logprobs: list[Json]) -> None:
        """More of the answer's text; logprobs of what shows none come with the next that does."""
        self._unshown += logprobs
        if not text:
            return
        pieces = [Text(text)] if self._calls is None else self._calls.push(text)
        for piece in pieces:
            self._write(piece)

    def end(self, status: str, is_whole: bool) -> None:
        """Nothing more comes; an answer without a word is an empty message.

        ``is_whole``: its grammar, if it has one, says that the answer is complete.
        """
        for piece in () if self._calls is None else self._calls.end(is_whole):
            self._write(piece)
        if not self._items:
            self._begin_message()
        if (writing := self._writing) is not None:
            is_cut_call = isinstance(writing, FunctionCall) and not self._is_complete
            writing.end("incomplete" if is_cut_call else status)

    def _write(self, piece: Piece) -> None:
        match piece:
            case Text(text):
                message = self._writing
                if not isinstance(message, Message):
                    self._end_writing()
                    message = self._begin_message()
                message.push(text, self._unshown)
            case CallBegins(_, name):
                self._end_writing()
                self._begin_call(name)
            case Arguments(_, text):
                call = self._writing
                assert isinstance(call, FunctionCall), piece
                call.push(text)
        self._unshown = []

    def items(self) -> list[Json]:
        """As they are now."""
        return [item.item() for item in self._items]

    @property
    def _is_complete(self) -> bool:
        return self._calls is not None and self._calls.is_complete

    @property
    def _writing(self) -> Item | None:
        last = self._items[-1] if self._items else None
        return last if last is not None and last.status == "in_progress" else None

    def _end_writing(self) -> None:
        """What was written is complete: something else begins."""
        if (writing := self._writing) is not None:
            writing.end("completed")

    def _begin_call(self, name: str) -> None:
        index = len(self._items)
        id, call_id = self._note.item_id("fc", index), self._note.item_id("call", index)
        call = FunctionCall(id, call_id, name, index, self._emit)
        self._items.append(call)
        call.begin()

    def _begin_message(self) -> Message:
        index = len(self._items)
        message = Message(self._note.item_id("msg", index), index, self._emit, self._is_told)
        self._items.append(message)
        message.begin()
        return message


def _part(text: str, logprobs: Sequence[Json] | orjson.Fragment) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _without_bytes(entry: Json) -> Json:
    """A token's entry as deltas have it."""
    tops: list[Any] = entry["top_logprobs"]
    return {
        "token": entry["token"],
        "logprob": entry["logprob"],
        "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in tops],
    }
