"""The whole answer to requests as one body of JSON."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from starlette.types import Receive, Scope, Send

from server.api.completion import JsonWriter
from server.api.large_responses import send_whole
from server.api.middleware.refuse import error_response
from server.api.request_answer import ENDS, RequestAnswer
from server.engine.types import Event, Request
from server.errors import RequestError
from server.models.service import Service


class JsonAnswer(RequestAnswer):
    """The whole answer in one body, by ``writer``; it may have ``num_bytes``."""

    def __init__(
        self,
        service: Service,
        requests: Request | Sequence[Request],
        writer: JsonWriter,
        num_bytes: int = 0,
    ) -> None:
        super().__init__(service, requests)
        self._large, self._writer, self._num_bytes = service.large_answers, writer, num_bytes

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as held:
            try:
                held.enter_context(self._large.reserve(self._request.owner, self._num_bytes))
                await self._submit()
                await self._collect()
                whole = self._large.parts(self._writer.whole(), self._num_bytes)
                parts = [part async for part in whole]
            except RequestError as error:
                await error_response(error)(scope, receive, send)
                return
            await send_whole(send, parts)

    async def _collect(self) -> None:
        """Gives all events to the writer; wakes up for those that are an end."""

        def collect(events: Sequence[Event]) -> bool:
            if isinstance(events[-1], ENDS):
                return False
            self._add(events)
            return True

        while not self._add(await self._event_queue.take(collect)):
            pass

    def _add(self, events: Sequence[Event]) -> bool:
        for event in events:
            self._writer.add(event)
        return self._is_end(events)
