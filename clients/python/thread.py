"""An event loop in a separate thread, for callers without an event loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeVar

from .errors import ConnectionLost

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other threads. It ends with `stop` or when it is garbage collected."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="everstream", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, self._loop, thread)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs ``work`` and returns its result. Cancels it if the caller is interrupted."""
        if not self._end.alive:
            work.close()
            raise ConnectionLost("the client was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Iterates over ``items`` from the calling thread."""

        async def step() -> T:
            return await anext(items)

        while True:
            try:
                item = self.run(step())
            except StopAsyncIteration:
                return
            yield item

    @contextmanager
    def entered(self, block: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Runs ``block`` as a ``with`` block of the calling thread."""
        entered = self.run(_coroutine(block.__aenter__()))
        try:
            yield entered
        except BaseException as error:
            left = block.__aexit__(type(error), error, error.__traceback__)
            if not self.run(_coroutine(left)):
                raise
        else:
            self.run(_coroutine(block.__aexit__(None, None, None)))

    def stop(self) -> None:
        """Ends the thread."""
        self._end()


async def _coroutine(work: Any) -> Any:
    return await work


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    asyncio.run_coroutine_threadsafe(_finish(loop), loop)
    if thread is not threading.current_thread():  # a finalizer may run in the thread itself
        thread.join()
        loop.close()


async def _finish(loop: asyncio.AbstractEventLoop) -> None:
    """Cancels the remaining tasks and waits for them before the loop stops."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    loop.stop()
