"""The output items of a response, and the events that make them, from those of its session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from io import StringIO
from typing import Any, ClassVar, TypeVar

import orjson

from model.chat import FORMS
from model.tokenizer import Tokenizer
from server.api.answers import server_sent
from server.api.chat.calls import Arguments, CallBegins, CallReader, Piece, Text, with_texts
from server.api.errors import SessionMigrated, error_object
from server.api.openai.choices import JsonList
from server.api.openai.responses.items import Json, Note, ResponseFailure, ResponseUsage, Status
from server.engine.types import Event, Failed, Finished, Migrated, Started, TokenEvent
from server.errors import RequestError

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


# -------------------------------------------------------------------------------------------------
# The events of a response from those of its session: the same ones whenever they are read.
#
# An event's number counts the events before it, so that a reader who has lost its
# connection, or the whole server, can ask for those after the last it has.


#: How an end of the engine's is called here.
STATUS: dict[str, Status] = {
    "stop": "completed",
    "length": "incomplete",
    "cancelled": "cancelled",
    "error": "failed",
}


#: Of a writer of whose work only the response is wanted, not the events.
SILENT = sys.maxsize


class ResponseWriter:
    """Writes those after number ``after``; `response` is the object as it is by now."""

    def __init__(self, note: Note, tokenizer: Tokenizer, after: int = -1) -> None:
        self.note = note
        self.is_over = False
        self._tokenizer, self._after = tokenizer, after
        self._num = 0
        self._written: list[bytes] = []
        self._names: dict[int, tuple[str, list[int]]] = {}
        self._output = Output(note, None if after == SILENT else self._emit)
        self._status: Status = "queued"
        self._end: Finished | None = None
        self._session: str | None = None
        self._length = 0
        self._token_ids: list[int] = []

    def write(self, event: Event) -> list[bytes]:
        """The events, as JSON, that one event of the engine's makes."""
        if isinstance(event, TokenEvent):
            if self.note.prompt_ids is not None:
                self._token_ids.append(event.token_id)
            if event.thought:
                self._output.think(event.thought)
            self._output.push(event.text, self._logprobs(event))
        elif isinstance(event, Started):
            self._start(event)
        elif isinstance(event, Finished):
            self._finish(event)
        elif isinstance(event, Failed | Migrated):
            return [self.error(event.error if isinstance(event, Failed) else SessionMigrated())]
        written, self._written = self._written, []
        return written

    def error(self, error: RequestError) -> bytes:
        """What ends a stream whose response has not ended. It does not count."""
        known = error_object(error)
        event = {"type": "error", "code": known["code"], "message": known["message"]}
        return orjson.dumps({**event, "param": known["param"], "sequence_number": self._num})

    @property
    def num_events(self) -> int:
        """Those that count, written or not; but not of a silent writer."""
        return self._num

    def response(self) -> Json:
        """The response object."""
        end = self._end
        is_cut = self._status == "incomplete"
        ids: Json = {}
        if self.note.prompt_ids is not None:
            ids = {"prompt_token_ids": [*self.note.prompt_ids], "token_ids": [*self._token_ids]}
        return {
            "id": self.note.id,
            "object": "response",
            "status": self._status,
            "error": None if end is None else _error(end),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output.items(),
            "usage": None if end is None else _usage(self._length, end),
            "session": self._session,
            **self.note.fields,
            **ids,
        }

    # The events of the engine

    def _start(self, event: Started) -> None:
        self._status, self._length = "in_progress", event.position
        if self.note.fields["store"]:
            self._session = event.session
        self._emit_response("created")
        self._emit_response("in_progress")

    def _finish(self, event: Finished) -> None:
        if event.thought:
            self._output.think(event.thought)
        self._output.push(event.text, [])
        self._status = STATUS[event.finish_reason or "stop"]
        status = "completed" if self._status == "completed" else "incomplete"
        self._output.end(status, is_whole=event.grammar_ended)
        self._end, self.is_over = event, True
        # OpenAI's streams have no event of a cancelled response's own.
        self._emit_response("incomplete" if self._status == "cancelled" else self._status)

    def _emit_response(self, kind: str) -> None:
        self._emit(kind, {"response": self.response()} if self._num > self._after else {})

    def _emit(self, kind: str, fields: Json) -> None:
        if self._num > self._after:
            event = {"type": f"response.{kind}", **fields, "sequence_number": self._num}
            self._written.append(orjson.dumps(event))
        self._num += 1

    def _logprobs(self, event: TokenEvent) -> list[Json]:
        if not self.note.logprobs or event.logprob is None or not self._bytes(event.token_id):
            return []
        if event.thought is not None and not event.text:
            return []
        tops = [self._entry(id, logprob) for id, logprob in event.top]
        return [{**self._entry(event.token_id, event.logprob), "top_logprobs": tops}]

    def _entry(self, id: int, logprob: float) -> Json:
        if (name := self._names.get(id)) is None:
            token = self._bytes(id)
            name = self._names[id] = token.decode(errors="replace"), list(token)
        return {"token": name[0], "logprob": logprob, "bytes": name[1]}

    def _bytes(self, id: int) -> bytes:
        return self._tokenizer.token_bytes(id)


def sse(event: bytes) -> bytes:
    """An event, which begins with its type, as a server-sent one; its number is its id.

    That ends it. An error does not count, and so has no id.
    """
    kind = event[len(b'{"type":"') : event.index(b'"', len(b'{"type":"'))]
    number = event[event.rindex(b":") + 1 : -1]
    return server_sent(event, kind, None if kind == b"error" else number)


def on_stream(event: bytes, stream_id: str | None) -> bytes:
    """An event as a socket sends it."""
    if stream_id is None:
        return event
    return b'%b,"stream_id":%b}' % (event[:-1], orjson.dumps(stream_id))


def _error(end: Finished) -> ResponseFailure | None:
    if end.finish_reason != "error":
        return None
    return {"code": "server_error", "message": end.error or "the request failed"}


def _usage(length: int, end: Finished) -> ResponseUsage:
    """All of the text counts as input; what was there before was not computed again."""
    num_input, num_output = length + end.usage.prompt_tokens, end.usage.completion_tokens
    return {
        "input_tokens": num_input,
        "input_tokens_details": {
            "cached_tokens": length + end.usage.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": end.usage.reasoning_tokens},
        "total_tokens": num_input + num_output,
    }
