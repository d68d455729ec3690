"""Generations as callers read them: the common `Reading` and its two public classes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from types import TracebackType
from typing import Any, Self

from .errors import EverstreamError
from .events import Event, Finished, Token
from .progress import Progress
from .protocol import Protocol
from .request import EndMessage, Request
from .stream import Stream
from .thread import LoopThread


class Reading(Progress):
    """The events of one request, for a single pass. The coroutines run on the stream's loop.

    ``_ahead`` holds events that have been fetched and not read yet, so that a slow
    reader, or one in another thread, fetches many events at once.
    """

    def __init__(self, stream: Stream, request: Request) -> None:
        super().__init__(request.request_id)
        self._stream = stream
        self._unsent: Request | None = request
        self._arrived = asyncio.Event()
        self._ahead: deque[Event] = deque()

    def __del__(self) -> None:
        self._stream.abandon(self.request_id)

    def _pop(self) -> Token | Finished | None:
        """Returns the next `Token` or `Finished`, or None if more must be fetched first."""
        while self._ahead:
            event = self._note(Protocol.checked(self._ahead.popleft()))
            if event is not None:
                return event
        return None

    async def _fetch(self) -> bool:
        """Waits for more events. Returns False if the request is over."""
        await self._start()
        if not self._stream.is_open(self.request_id):
            return False
        self._ahead.extend(await self._stream.next(self.request_id, self._arrived))
        return True

    async def _fetch_first(self) -> None:
        """Waits for the answer to a `resume`; raises if the server refuses it."""
        await self._fetch()
        self._note(Protocol.checked(self._ahead.popleft()))

    async def _start(self) -> None:
        request, self._unsent = self._unsent, None
        if request is not None:
            await self._stream.start(request, self._arrived)

    async def _cancel(self) -> Finished | None:
        self._unsent = None
        self._stream.request_end(EndMessage("cancel", self.request_id))
        while self._pop() is not None or await self._fetch():
            pass
        return self.finished

    async def _leave(self, kind: type[BaseException] | None) -> None:
        """Cancels. An error of the block takes precedence over one of the cancel."""
        try:
            await self._cancel()
        except EverstreamError:
            if kind is None:
                raise

    async def _detach(self) -> None:
        await self._start()
        self._stream.request_end(EndMessage("detach", self.request_id))
        self._ahead.clear()
        while self._stream.is_open(self.request_id):
            for event in await self._stream.next(self.request_id, self._arrived):
                Protocol.checked(event)


class AsyncGeneration(Reading):
    """`Generation` for asyncio.

    It starts when it is awaited, entered with ``async with``, or first iterated. It
    is cancelled when its ``async with`` block ends or Python deletes the object, for
    example after a ``break`` out of an ``async for`` over it.
    """

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token | Finished:
        while (event := self._pop()) is None:
            if not await self._fetch():
                raise StopAsyncIteration
        return event

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._leave(kind)

    async def cancel(self) -> Finished | None:
        """Cancels the generation if it still runs, and returns its `Finished`.

        Unread events are discarded.
        """
        return await self._cancel()

    async def detach(self) -> None:
        """Stops reading, and leaves the generation of a kept session running.

        `AsyncClient.resume` returns the unread events, from ``last_seq`` on.
        """
        await self._detach()

    async def text(self) -> str:
        """Waits for the end and returns the text of all unread events."""
        return "".join([event.text async for event in self])


class Generation(Reading):
    """The events of a generation, for a single pass.

    Iterating yields a `Token` for each token and a `Finished` at the end. The answer
    is the ``text`` of all events, joined. The first event sets ``started``, or
    ``resumed`` if the events are read again.

    The generation is cancelled when its ``with`` block ends or Python deletes the
    object, for example after a ``break`` out of a ``for`` over it. Call `detach`
    before that to leave it running.
    """

    def __init__(self, stream: Stream, request: Request, thread: LoopThread) -> None:
        super().__init__(stream, request)
        self._thread = thread

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token | Finished:
        while (event := self._pop()) is None:
            if not self._thread.run(self._fetch()):
                raise StopIteration
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.run(self._leave(kind))

    def cancel(self) -> Finished | None:
        """Cancels the generation if it still runs, and returns its `Finished`.

        Unread events are discarded.
        """
        return self._thread.run(self._cancel())

    def detach(self) -> None:
        """Stops reading, and leaves the generation of a kept session running.

        `Client.resume` returns the unread events, from ``last_seq`` on.
        """
        self._thread.run(self._detach())

    def text(self) -> str:
        """Waits for the end and returns the text of all unread events."""
        return "".join(event.text for event in self)
