"""The whole answer to requests as one body of JSON."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Scope, Send

from server.api.completion import JsonWriter
from server.api.large_responses import send_whole
from server.api.request_answer import RequestAnswer
from server.api.watched import ENDS
from server.engine.types import Event


class JsonAnswer(RequestAnswer[JsonWriter]):
    """The whole answer in one body, by ``writer``; it may have ``num_bytes``."""

    async def _work(self, scope: Scope, send: Send) -> None:
        with self._large.reserve(self._request.owner, self._num_bytes):
            await self._submit()
            await self._collect()
            whole = self._large.parts(self._writer.whole(), self._num_bytes)
            await send_whole(send, [part async for part in whole])

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
