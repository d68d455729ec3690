"""The answer to requests as server-sent events, as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Protocol

from starlette.types import Scope, Send

from server.api.completion import DONE, ended, sse
from server.api.direct_write import DirectWriter, writer_of
from server.api.errors import error_object
from server.api.event_stream import send_stream
from server.api.request_answer import RequestAnswer
from server.engine.types import Event, Failed, Finished, Migrated
from server.errors import RequestError


class Writer(Protocol):
    """Writes the server-sent events for events of the engine, and what comes after the last.

    ``parts`` are those for an event that may make large ones, None for any other.
    """

    def chunks(self, event: Event, /) -> bytes: ...
    def parts(self, event: Event, /) -> Iterator[bytes] | None: ...
    def end(self) -> bytes: ...


class SseAnswer(RequestAnswer[Writer]):
    """Chunks as they come, by ``writer``; those of one event may have ``num_bytes``.

    Until the first event a failure is a plain HTTP error.
    """

    async def _work(self, scope: Scope, send: Send) -> None:
        with self._large.reserve(self._request.owner, self._num_bytes):
            await self._submit()
            events = await self._event_queue.take()
            _raise_if_failed(events)
            direct = DirectWriter(writer_of(scope), self._encode)
            await send_stream(send, self._pieces(events, direct), _error)

    def _encode(self, events: Sequence[Event]) -> list[bytes]:
        return [self._writer.chunks(event) for event in events]

    async def _pieces(
        self, events: Sequence[Event], direct: DirectWriter
    ) -> AsyncGenerator[bytes, None]:
        """Those of ``events``, then of the event queue's until all requests have ended."""
        while True:
            made: list[bytes] = []
            for event in events:
                if (parts := self._writer.parts(event)) is None:
                    made += self._encode([event])
                    continue
                yield b"".join(made)
                made.clear()
                async for part in self._large.parts(parts, self._num_bytes):
                    yield part
            if self._is_end(events):
                yield b"".join([*made, self._writer.end()])
                return
            yield b"".join(made)
            refused, events = await direct.take(self._event_queue)
            yield b"".join(refused)


def _error(error: RequestError) -> bytes:
    return sse({"error": error_object(error)}) + DONE


def _raise_if_failed(events: list[Event]) -> None:
    """Raises where a request failed before its first token."""
    for event in events:
        if isinstance(event, Failed | Migrated):
            ended([event])
        if (
            isinstance(event, Finished)
            and event.finish_reason == "error"
            and event.usage.completion_tokens == 0
        ):
            ended([event])
