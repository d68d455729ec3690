"""Anthropic's answers: a ``message``, whole or as server-sent events, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from server.api.answers import HEADERS, ended, server_sent
from server.api.chat.calls import Arguments, CallBegins, Text
from server.api.chat.prepare import PreparedChat
from server.api.chat.reader import AnswerPiece, AnswerReader, StopFinder, Thought, WholeAnswer
from server.api.errors import ErrorShape, error_object, outcome
from server.engine.types import Event, Finished, Scored, Started, TokenEvent, Usage
from server.errors import RequestError
from server.models.service import Service

#: Of these Anthropic's clients know that others can be served, and come back.
OVERLOADED = frozenset({"capacity_exhausted", "draining", "too_many_connections", "out_of_memory"})
OVERLOADED_STATUS = 529

#: By this the Python package sends a conversation again as a whole, and names no thread any more.
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    410: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "request_too_large",
    OVERLOADED_STATUS: "overloaded_error",
}


def status_of(error: RequestError) -> int:
    """The HTTP status of ``error``."""
    return OVERLOADED_STATUS if error.code in OVERLOADED else outcome(error).status


def anthropic_error(error: RequestError) -> dict[str, object]:
    """The object of an error, with our own ``code`` and ``param`` next to Anthropic's fields."""
    ours = error_object(error)
    shown: dict[str, object] = {
        "type": _TYPES.get(status_of(error), "api_error"),
        "message": ours["message"],
        "code": ours["code"],
        "param": ours["param"],
    }
    if error.param == "thread":
        shown["details"] = NO_THREADS
    return {"type": "error", "error": shown}


ERRORS = ErrorShape(lambda error: orjson.dumps(anthropic_error(error)), status_of)


Json = dict[str, Any]

#: Of thinking: Anthropic's clients send it back, and nothing here looks at it.
SIGNATURE = "everstream"

PING = server_sent(b'{"type": "ping"}', b"ping")


class MessageWriter:
    """Writes the one answer of ``chat``, which ends by one of ``stops`` or otherwise.

    Without ``shows_thoughts`` a block of thinking is empty.
    """

    headers = HEADERS
    comment = PING

    def __init__(
        self, service: Service, chat: PreparedChat, stops: list[str], shows_thoughts: bool
    ) -> None:
        request = chat.request
        self._id, self._model = request.request_id, service.model.name
        self._num_prompt_tokens = len(request.tokens)
        self._is_kept = request.keep
        self._thinks = request.sampling is not None and request.sampling.turn is not None
        self._shows_thoughts = shows_thoughts
        self._reader, self._stops = AnswerReader(chat.calls), StopFinder(stops, service.tokenizer)
        self._answer = WholeAnswer(self._reader)
        self._last: Event | None = None
        # The block that is open: its number, its type, and what is around a text's piece.
        self._index, self._kind = -1, ""
        self._around = b"", b""

    # Whole

    def add(self, event: Event) -> None:
        """Takes in an event of a whole answer."""
        if isinstance(event, TokenEvent):
            self._stops.add(event)
            self._answer.add(self._reader.read(event))
        elif isinstance(event, Started):
            self._start(event)
        elif not isinstance(event, Scored):
            self._last = event

    def whole(self) -> Iterator[bytes]:
        """The JSON answer; raises the `RequestError` that it ended by."""
        assert self._last is not None, self._id
        end = ended(self._last)
        self._answer.add(self._reader.finish(end))
        message = self._head(self._usage(end.usage)) | {"content": self._blocks()}
        yield orjson.dumps(message | self._reason(end))

    def _blocks(self) -> list[Json]:
        blocks: list[Json] = []
        if thoughts := self._answer.thoughts:
            blocks.append(self._thinking(thoughts if self._shows_thoughts else "") | _SIGNED)
        if text := self._answer.text:
            blocks.append({"type": "text", "text": text})
        calls = self._answer.calls
        return blocks + [{**_call(call.id, call.name), "input": call.given} for call in calls]

    # In events

    def token(self, event: TokenEvent) -> bytes:
        """The server-sent events for one token."""
        self._stops.add(event)
        return b"".join(map(self._piece, self._reader.read(event)))

    def chunks(self, event: Event) -> bytes:
        """The server-sent events for one event of the engine."""
        if isinstance(event, TokenEvent):
            return self.token(event)
        if isinstance(event, Scored):
            return b""
        if isinstance(event, Started):
            self._start(event)
            message = self._head(self._usage(Usage(self._num_prompt_tokens, 0))) | {"content": []}
            return _event("message_start", message=message)
        try:
            end = ended(event)
        except RequestError as error:
            return self.error(error)
        pieces = b"".join(map(self._piece, self._reader.finish(end)))
        usage = self._usage(end.usage)
        last = _event("message_delta", delta=self._reason(end), usage=usage)
        return pieces + self._close() + last + _event("message_stop")

    def end(self) -> bytes:
        """Nothing: the message has said that it is over."""
        return b""

    def error(self, error: RequestError) -> bytes:
        """What ends a stream that cannot be finished."""
        return server_sent(orjson.dumps(anthropic_error(error)), b"error")

    def _piece(self, piece: AnswerPiece) -> bytes:
        if isinstance(piece, Text):
            opened = self._open("text", {"type": "text", "text": ""})
            before, after = self._around
            return b"%b%b%b%b" % (opened, before, orjson.dumps(piece.text), after)
        if isinstance(piece, Thought):
            opened = self._open("thinking", self._thinking(""))
            if not self._shows_thoughts:
                return opened
            return opened + self._delta({"type": "thinking_delta", "thinking": piece.text})
        if isinstance(piece, CallBegins):
            call = _call(self._reader.new_call_id(piece.index), piece.name)
            return self._open(f"call {piece.index}", {**call, "input": {}})
        assert isinstance(piece, Arguments), piece
        return self._delta({"type": "input_json_delta", "partial_json": piece.text})

    def _open(self, kind: str, block: Json) -> bytes:
        """Begins a block unless one of this ``kind`` is open."""
        if kind == self._kind:
            return b""
        closed = self._close()
        self._index, self._kind = self._index + 1, kind
        if kind == "text":
            before, _, after = self._delta({"type": "text_delta", "text": "TEXT"}).partition(
                b'"TEXT"'
            )
            self._around = before, after
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        """Ends the block that is open, if there is one."""
        if not self._kind:
            return b""
        signed = b""
        if self._kind == "thinking":
            signed = self._delta({"type": "signature_delta", **_SIGNED})
        self._kind = ""
        return signed + _event("content_block_stop", index=self._index)

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    # Both

    def _start(self, event: Started) -> None:
        if self._is_kept:
            self._reader.start(event)

    def _head(self, usage: Json) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _reason(self, end: Finished) -> Json:
        """Why it ended. A call that was cut short does not count as one."""
        if end.finish_reason != "stop":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._reader.has_called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        stop = self._stops.found()
        return {
            "stop_reason": "end_turn" if stop is None else "stop_sequence",
            "stop_sequence": stop,
        }

    def _usage(self, usage: Usage) -> Json:
        """Tokens of the prompt are counted apart where the prefix cache had them.

        What the cache keeps of this prompt costs nothing, and is counted as none.
        """
        counts: Json = {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
        if self._thinks:
            counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
        return counts

    def _thinking(self, thoughts: str) -> Json:
        return {"type": "thinking", "thinking": thoughts, "signature": ""}


_SIGNED = {"signature": SIGNATURE}


def _event(kind: str, **fields: Any) -> bytes:
    return server_sent(orjson.dumps({"type": kind, **fields}), kind.encode())


def _call(id: str, name: str) -> Json:
    return {"type": "tool_use", "id": f"toolu_{id}", "name": name}
