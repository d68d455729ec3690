"""The answer to requests as server-sent events, as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol

from starlette.types import Receive, Scope, Send

from server.api.completion import DONE, ended, sse
from server.api.errors import error_object
from server.api.event_stream import EventStream, event_stream
from server.api.middleware.refuse import error_response
from server.api.request_answer import RequestAnswer
from server.engine.types import Event, Failed, Finished, Migrated, Request
from server.errors import RequestError
from server.models.service import Service


class Writer(Protocol):
    """Writes the server-sent events for events of the engine, and what comes after the last.

    ``parts`` are those for an event that may make large ones, None for any other.
    """

    def chunks(self, event: Event, /) -> bytes: ...
    def parts(self, event: Event, /) -> Iterator[bytes] | None: ...
    def end(self) -> bytes: ...


class SseAnswer(RequestAnswer):
    """Chunks as they come, by ``writer``; those of one event may have ``num_bytes``.

    Until the first event a failure is a plain HTTP error.
    """

    def __init__(
        self,
        service: Service,
        requests: Request | Sequence[Request],
        writer: Writer,
        num_bytes: int = 0,
    ) -> None:
        super().__init__(service, requests)
        self._large, self._writer, self._num_bytes = service.large_answers, writer, num_bytes

    def encode(self, events: Sequence[Event]) -> list[bytes]:
        return [self._writer.chunks(event) for event in events]

    def error(self, error: RequestError) -> bytes:
        return sse({"error": error_object(error)}) + DONE

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as held:
            try:
                held.enter_context(self._large.reserve(self._request.owner, self._num_bytes))
                await self._submit()
                events = await self._event_queue.take()
                _raise_if_failed(events)
            except RequestError as error:
                await error_response(error)(scope, receive, send)
                return
            async with event_stream(scope, send, self) as stream:
                while not await self._write(stream, events):
                    events = await stream.take(self._event_queue)

    async def _write(self, stream: EventStream, events: Sequence[Event]) -> bool:
        """Sends ``events``; whether the answer has ended with them."""
        made: list[bytes] = []
        for event in events:
            if (parts := self._writer.parts(event)) is None:
                made.append(self._writer.chunks(event))
                continue
            await stream.write(b"".join(made))
            made.clear()
            async for part in self._large.parts(parts, self._num_bytes):
                await stream.write(part)
        if is_end := self._is_end(events):
            made.append(self._writer.end())
        await stream.write(b"".join(made))
        return is_end


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
