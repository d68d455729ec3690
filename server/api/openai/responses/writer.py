"""The events of a response from those of its session: the same ones whenever they are read.

An event's number counts the events before it, so that a reader who has lost its
connection, or the whole server, can ask for those after the last it has.
"""

from __future__ import annotations

import sys

import orjson

from model.tokenizer import Tokenizer
from server.api.errors import SessionMigrated, error_object
from server.api.openai.responses.answers_schema import ResponseFailure, ResponseUsage, Status
from server.api.openai.responses.note import Json, Note
from server.api.openai.responses.output import Output
from server.api.streaming import server_sent
from server.engine.types import Event, Failed, Finished, Migrated, Started, TokenEvent
from server.errors import RequestError

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
