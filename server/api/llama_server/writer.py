"""llama.cpp's answer to a completion, whole or as server-sent events, with its timings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from typing import Any

import orjson

from server.api.answers import HEADERS, ended, sse
from server.api.chat.stops import StopFinder
from server.api.llama_server.body import StopType
from server.api.llama_server.errors import llama_error
from server.engine.types import Event, Finished, Request, Scored, Started, TokenEvent, Usage
from server.errors import RequestError
from server.models.service import Service

Json = dict[str, Any]


class LlamaWriter:
    """Writes the answer to ``request``, which ends by one of ``stops`` or otherwise.

    ``clock`` has seconds. With ``token_ids`` they are shown.
    """

    headers = HEADERS
    comment = b""

    def __init__(
        self,
        service: Service,
        request: Request,
        stops: Sequence[str],
        token_ids: bool,
        clock: Callable[[], float],
    ) -> None:
        self._service, self._request, self._clock = service, request, clock
        self._stops, self._shows_ids = StopFinder(stops, service.tokenizer), token_ids
        self._text, self._ids = StringIO(), list[int]()
        self._num_predicted, self._has_new_line = 0, False
        self._begun_s, self._first_s = clock(), 0.0
        self._last: Event | None = None

    # Whole

    def add(self, event: Event) -> None:
        """Takes in an event of a whole answer."""
        if isinstance(event, TokenEvent):
            self._read(event)
            self._text.write(event.text)
        elif not isinstance(event, Started | Scored):
            self._last = event

    def whole(self) -> Iterator[bytes]:
        """The JSON answer; raises the `RequestError` that it ended by."""
        assert self._last is not None
        end = ended(self._last)
        self._text.write(end.text)
        yield orjson.dumps(self._end(end, self._text.getvalue()))

    # In events

    def token(self, event: TokenEvent) -> bytes:
        """The server-sent event for one token."""
        self._read(event)
        counts = {
            "tokens_predicted": self._num_predicted,
            "tokens_evaluated": len(self._request.tokens),
        }
        return sse({**self._piece(event.text), **counts})

    def chunks(self, event: Event) -> bytes:
        """The server-sent events for one event of the engine."""
        if isinstance(event, TokenEvent):
            return self.token(event)
        if isinstance(event, Started | Scored):
            return b""
        try:
            end = ended(event)
        except RequestError as error:
            return self.error(error)
        rest = sse(self._piece(end.text)) if end.text else b""
        return rest + sse(self._end(end, ""))

    def end(self) -> bytes:
        """Nothing: the last event says that it is the last."""
        return b""

    def error(self, error: RequestError) -> bytes:
        """What ends a stream that cannot be finished."""
        return sse(llama_error(error))

    # Both

    def _read(self, event: TokenEvent) -> None:
        if not self._first_s:
            self._first_s = self._clock()
        self._num_predicted += 1
        self._has_new_line |= "\n" in event.text
        self._stops.add(event)
        if self._shows_ids:
            self._ids.append(event.token_id)

    def _piece(self, text: str) -> Json:
        ids, self._ids = self._ids, []
        return {"index": 0, "content": text, "tokens": ids, "id_slot": 0, "stop": False}

    def _end(self, end: Finished, text: str) -> Json:
        usage, word = end.usage, self._stops.found() if end.finish_reason == "stop" else None
        stop_type: StopType = "limit"
        if end.finish_reason == "stop":
            stop_type = "eos" if word is None else "word"
        params = self._request.sampling
        settings = {} if params is None else {"seed": params.seed, "n_predict": params.max_tokens}
        return {
            **self._piece(text),
            "stop": True,
            "model": self._service.model.name,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "generation_settings": settings,
            "has_new_line": self._has_new_line or "\n" in end.text,
            "truncated": False,
            "stop_type": stop_type,
            "stopping_word": word or "",
            "timings": self._timings(usage),
        }

    def _timings(self, usage: Usage) -> Json:
        now_s = self._clock()
        first_s = self._first_s or now_s
        num_read = usage.prompt_tokens - usage.cached_tokens
        return {
            "cache_n": usage.cached_tokens,
            **_speed("prompt", num_read, first_s - self._begun_s),
            **_speed("predicted", usage.completion_tokens, now_s - first_s),
        }


def _speed(what: str, number: int, seconds: float) -> Json:
    """Of ``number`` tokens; no time at all is taken for a microsecond."""
    milliseconds = max(1e3 * seconds, 1e-3)
    return {
        f"{what}_n": number,
        f"{what}_ms": milliseconds,
        f"{what}_per_token_ms": milliseconds / max(number, 1),
        f"{what}_per_second": 1e3 * number / milliseconds,
    }
