"""Ollama's answers to a chat and to a prompt, whole or in lines of JSON, and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson
from typing_extensions import TypedDict

from server.api.answers import ended
from server.api.chat.prepare import PreparedChat
from server.api.chat.reader import AnswerPiece, AnswerReader, WholeAnswer
from server.api.errors import ErrorShape, error_object, outcome
from server.engine.types import Event, Finished, Scored, Started, TokenEvent
from server.errors import RequestError


class OllamaErrorAnswer(TypedDict):
    """Every error under these paths; ``code`` and ``param`` are those of all our errors."""

    error: str
    code: str
    param: str | None


def ollama_error(error: RequestError) -> OllamaErrorAnswer:
    """The body, and the last line of a stream that cannot be finished."""
    ours = error_object(error)
    return {"error": ours["message"], "code": ours["code"], "param": ours["param"]}


ERRORS = ErrorShape(
    lambda error: orjson.dumps(ollama_error(error)), lambda error: outcome(error).status
)


Json = dict[str, Any]

HEADERS = [
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


def shown_time() -> str:
    """Now, as Ollama writes times."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """At least 1: clients divide by it."""
    return max(1, int(seconds * 1e9))


class OllamaWriter:
    """Writes the answer to ``chat`` by the model ``name``; ``clock`` has seconds.

    It is a message, or with ``is_prompt`` a text. Calls come together in one line before the last.
    """

    headers = HEADERS
    comment = b""

    def __init__(
        self, name: str, chat: PreparedChat, is_prompt: bool, clock: Callable[[], float]
    ) -> None:
        self._name, self._is_prompt, self._clock = name, is_prompt, clock
        self._reader = AnswerReader(chat.calls)
        self._answer = WholeAnswer(self._reader)
        self._is_kept = chat.request.keep
        self._begun_s, self._first_s = clock(), 0.0
        self._last: Event | None = None

    # Whole

    def add(self, event: Event) -> None:
        """Takes in an event of a whole answer."""
        if isinstance(event, TokenEvent):
            self._read(event)
        elif isinstance(event, Started):
            self._start(event)
        elif not isinstance(event, Scored):
            self._last = event

    def whole(self) -> Iterator[bytes]:
        """The JSON answer; raises the `RequestError` that it ended by."""
        assert self._last is not None
        end = ended(self._last)
        self._answer.add(self._reader.finish(end))
        said = self._said(self._answer.text, self._answer.thoughts, self._calls())
        yield orjson.dumps(self._head() | said | self._end(end))

    # In lines

    def token(self, event: TokenEvent) -> bytes:
        """The line for one token, unless it is of a call or shows nothing."""
        self._read(event)
        return self._line()

    def chunks(self, event: Event) -> bytes:
        """The lines for one event of the engine."""
        if isinstance(event, TokenEvent):
            return self.token(event)
        if isinstance(event, Scored):
            return b""
        if isinstance(event, Started):
            self._start(event)
            return b""
        try:
            end = ended(event)
        except RequestError as error:
            return self.error(error)
        self._answer.add(self._reader.finish(end))
        last = self._head() | self._said("", "", []) | self._end(end)
        return self._line(self._calls()) + _written(last)

    def end(self) -> bytes:
        """Nothing: the last line says that it is the last."""
        return b""

    def error(self, error: RequestError) -> bytes:
        """What ends a stream that cannot be finished."""
        return _written(ollama_error(error))

    # Both

    def _start(self, event: Started) -> None:
        if self._is_kept:
            self._reader.start(event)

    def _read(self, event: TokenEvent) -> None:
        if not self._first_s:
            self._first_s = self._clock()
        pieces: list[AnswerPiece] = self._reader.read(event)
        self._answer.add(pieces)

    def _line(self, calls: list[Json] | None = None) -> bytes:
        """What has come since the last line; nothing where that is nothing."""
        text, thoughts = self._answer.take()
        if not (text or thoughts or calls):
            return b""
        return _written(self._head() | self._said(text, thoughts, calls or []) | {"done": False})

    def _head(self) -> Json:
        return {"model": self._name, "created_at": shown_time()}

    def _said(self, text: str, thoughts: str, calls: list[Json]) -> Json:
        thought = {"thinking": thoughts} if thoughts else {}
        if self._is_prompt:
            return {"response": text, **thought}
        called = {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": text, **thought, **called}}

    def _calls(self) -> list[Json]:
        return [
            {"id": f"call_{call.id}", "function": {"name": call.name, "arguments": call.given}}
            for call in self._answer.calls
        ]

    def _end(self, end: Finished) -> Json:
        """Counts and times. ``prompt_cached_count`` is ours: what the prefix cache had."""
        now_s = self._clock()
        first_s = self._first_s or now_s
        return {
            "done": True,
            "done_reason": "length" if end.finish_reason == "length" else "stop",
            "total_duration": nanoseconds(now_s - self._begun_s),
            "load_duration": 0,
            "prompt_eval_count": end.usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(first_s - self._begun_s),
            "eval_count": end.usage.completion_tokens,
            "eval_duration": nanoseconds(now_s - first_s),
            "prompt_cached_count": end.usage.cached_tokens,
        }


def _written(line: Mapping[str, object]) -> bytes:
    return orjson.dumps(line) + b"\n"
