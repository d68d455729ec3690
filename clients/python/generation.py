"""A generation as its reader has it: one `Reading`, and what two kinds of callers call."""

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
    """The events of one request, once over. The coroutines belong to the stream's loop.

    What has arrived waits ``ahead`` of the reader, so that one who is slow, or
    is in another thread, fetches many events at once.
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
        """The next event that has text to show; None where more must be fetched first."""
        while self._ahead:
            event = self._note(Protocol.checked(self._ahead.popleft()))
            if event is not None:
                return event
        return None

    async def _fetch(self) -> bool:
        """Waits for more events. False where there are none."""
        await self._start()
        if not self._stream.is_open(self.request_id):
            return False
        self._ahead.extend(await self._stream.next(self.request_id, self._arrived))
        return True

    async def _fetch_first(self) -> None:
        """Waits for the answer to a `resume`; raises where it is that nothing can be read."""
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
        """Cancels; an error in that does not hide the one that the block is left by."""
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

    It starts when it is awaited, entered with ``async with``, or first iterated.
    Dropping it, as an ``async for`` over it does that is left early, cancels what
    still runs.
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
        """Ends it and returns its `Finished`; one that is over is left alone."""
        return await self._cancel()

    async def detach(self) -> None:
        """Leaves it to continue by itself, if its session is kept, and ends the iteration.

        What has not been read is still there for `AsyncClient.resume`, from
        ``last_seq`` on.
        """
        await self._detach()

    async def text(self) -> str:
        """All of the text, when it is there."""
        return "".join([event.text async for event in self])


class Generation(Reading):
    """The events of a running generation, once over.

    Iterating gives a `Token` for each token and ends with a `Finished`, so that
    the ``text`` of all events joined is the answer. ``started`` is set from the
    first event on, or ``resumed`` where it is read again. Leaving its ``with``
    block, or dropping it, as a ``for`` over it does that is left early, cancels
    what still runs; `detach` it first where it shall continue.
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
        """Ends it and returns its `Finished`; one that is over is left alone."""
        return self._thread.run(self._cancel())

    def detach(self) -> None:
        """Leaves it to continue by itself, if its session is kept, and ends the iteration.

        What has not been read is still there for `Client.resume`, from ``last_seq`` on.
        """
        self._thread.run(self._detach())

    def text(self) -> str:
        """All of the text, when it is there."""
        return "".join(event.text for event in self)
