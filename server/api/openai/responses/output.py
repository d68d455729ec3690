"""The output items of a response, and the events that make them, from the model's text."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any, ClassVar, TypeVar

from model.chat.call_forms import FORMS
from server.api.openai.chat.call_reader import (
    Arguments,
    CallBegins,
    CallReader,
    Piece,
    Text,
)
from server.api.openai.chat.tools import with_texts
from server.api.openai.logprobs import JsonList
from server.api.openai.responses.note import Json, Note

#: Takes the type of an event, without ``response.``, and its fields.
Emit = Callable[[str, Json], None]


class Item:
    """An item while it is written. Its events go to ``emit``, if there is one."""

    #: What its text is called in events, and where that is.
    text_type: ClassVar[str]
    text_place: ClassVar[Json] = {"content_index": 0}

    def __init__(self, id: str, index: int, emit: Emit | None) -> None:
        self.id, self.status = id, "in_progress"
        self._index, self._emit = index, emit
        self._text = StringIO()

    def item(self) -> Json:
        """As it is now."""
        raise NotImplementedError

    def done(self) -> Json:
        """What the event that ends its text has."""
        return {"text": self._text.getvalue()}

    def begin(self) -> None:
        """Nothing of it is there yet."""
        item = self.item()
        parts = item.get("content", ())
        self._tell("output_item.added", {"item": item | {"content": []} if parts else item})
        for part in parts:
            self._tell_of_text("content_part.added", {"part": part})

    def push(self, text: str, **more: Any) -> None:
        """More of its text; the event says ``more``."""
        self._text.write(text)
        self._tell_of_text(f"{self.text_type}.delta", {"delta": text, **more})

    def end(self, status: str) -> None:
        """Nothing more comes."""
        self.status = status
        if self._emit is None:
            return
        item = self.item()
        self._tell_of_text(f"{self.text_type}.done", self.done())
        for part in item.get("content", ()):
            self._tell_of_text("content_part.done", {"part": part})
        self._tell("output_item.done", {"item": item})

    def _tell(self, kind: str, fields: Json) -> None:
        if self._emit is not None:
            self._emit(kind, {"output_index": self._index, **fields})

    def _tell_of_text(self, kind: str, fields: Json) -> None:
        if self._emit is not None:
            place = {"item_id": self.id, "output_index": self._index, **self.text_place}
            self._emit(kind, place | fields)


class Message(Item):
    """A message of the assistant's."""

    text_type = "output_text"

    def __init__(self, id: str, index: int, emit: Emit | None) -> None:
        super().__init__(id, index, emit)
        self._logprobs, self._shown = JsonList(), JsonList()

    def write(self, text: str, logprobs: list[Json]) -> None:
        """More text; deltas show log-probabilities without the bytes of the tokens."""
        self._logprobs.add(logprobs)
        shown = [] if self._emit is None else [_without_bytes(entry) for entry in logprobs]
        self._shown.add(shown)
        self.push(text, logprobs=shown)

    def done(self) -> Json:
        return {**super().done(), "logprobs": self._shown.json()}

    def item(self) -> Json:
        part = {"type": "output_text", "text": self._text.getvalue(), "annotations": []}
        return {
            "id": self.id,
            "type": "message",
            "status": self.status,
            "role": "assistant",
            "content": [{**part, "logprobs": self._logprobs.json()}],
        }


class ReasoningItem(Item):
    """What the model thinks before it answers."""

    text_type = "reasoning_text"

    def item(self) -> Json:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": self.status,
            "summary": [],
            "content": [{"type": "reasoning_text", "text": self._text.getvalue()}],
        }


class FunctionCall(Item):
    """A call of one of the client's functions."""

    text_type = "function_call_arguments"
    text_place: ClassVar[Json] = {}

    def __init__(self, id: str, index: int, emit: Emit | None, call_id: str, name: str) -> None:
        super().__init__(id, index, emit)
        self._call_id, self._name = call_id, name

    def done(self) -> Json:
        return {"name": self._name, "arguments": self._text.getvalue()}

    def item(self) -> Json:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self._call_id,
            **self.done(),
        }


Begun = TypeVar("Begun", bound=Item)


class Output:
    """All items of one response, in order; at most the last is being written."""

    def __init__(self, note: Note, emit: Emit | None) -> None:
        self._note, self._emit = note, emit
        form = with_texts(FORMS[note.call_form], note.tools)
        self._calls = CallReader(form) if note.may_call else None
        self._items: list[Item] = []
        self._unshown: list[Json] = []

    def think(self, text: str) -> None:
        """More of what the model thinks before its answer."""
        thinking = self._writing
        if not isinstance(thinking, ReasoningItem):
            thinking = self._begin(ReasoningItem(*self._place("rs"), self._emit))
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
            self._begin(Message(*self._place("msg"), self._emit))
        if (writing := self._writing) is not None:
            is_complete = self._calls is not None and self._calls.is_complete
            is_cut_call = isinstance(writing, FunctionCall) and not is_complete
            writing.end("incomplete" if is_cut_call else status)

    def items(self) -> list[Json]:
        """As they are now."""
        return [item.item() for item in self._items]

    def _write(self, piece: Piece) -> None:
        writing = self._writing
        match piece:
            case Text(text):
                if not isinstance(writing, Message):
                    writing = self._begin(Message(*self._place("msg"), self._emit))
                writing.write(text, self._unshown)
            case CallBegins(_, name):
                id, index = self._place("fc")
                call_id = self._note.item_id("call", index)
                self._begin(FunctionCall(id, index, self._emit, call_id, name))
            case Arguments(_, text):
                assert isinstance(writing, FunctionCall), piece
                writing.push(text)
        self._unshown = []

    @property
    def _writing(self) -> Item | None:
        last = self._items[-1] if self._items else None
        return last if last is not None and last.status == "in_progress" else None

    def _place(self, kind: str) -> tuple[str, int]:
        """The name of the next item, of ``kind``, and its index."""
        index = len(self._items)
        return self._note.item_id(kind, index), index

    def _begin(self, item: Begun) -> Begun:
        """What was written is complete: something else begins."""
        if (writing := self._writing) is not None:
            writing.end("completed")
        self._items.append(item)
        item.begin()
        return item


def _without_bytes(entry: Json) -> Json:
    """A token's entry as deltas have it."""
    tops: list[Any] = entry["top_logprobs"]
    return {
        "token": entry["token"],
        "logprob": entry["logprob"],
        "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in tops],
    }
