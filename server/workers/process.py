"""Child processes for work that could hang or exhaust this one, and who uses one next."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import PIPE, Process
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from server.workers.frames import LENGTH, frame

# -------------------------------------------------------------------------------------------------
# The parent's side of a worker: it starts with the first request, and again after it has ended.
#
# A worker is a new program, not a copy of this process: nothing that is open here is open there.


#: The folder that has `server`.
ROOT = Path(__file__).parent.parent.parent
START_TIMEOUT_S = 30.0


class WorkerUnavailable(Exception):
    """The process does not start, or does not answer its setup."""


class WorkerEnded(Exception):
    """The process ended before it answered. ``code`` is its return code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the process ended with {code}")
        self.code = code


class WorkerProcess:
    """Answers one request at a time: the caller keeps the order. `close` it.

    ``env`` is all of its environment. ``setup``, if not None, is its first request each time
    that it starts.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | None = None,
        setup: object = None,
    ) -> None:
        self._command, self._env, self._cwd = command, env, cwd
        self._setup = None if setup is None else frame(setup)
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    async def ask(self, request: object, timeout_s: float | None = None) -> Any:
        """The answer. Whatever prevents one costs the process.

        Raises `WorkerUnavailable`, `WorkerEnded`, and TimeoutError after ``timeout_s``.
        """
        body = frame(request)
        process = await self._ready()
        try:
            async with asyncio.timeout(timeout_s):
                return await _exchange(process, body)
        except BaseException:  # the answer would be taken for the next one's
            await self.close()
            raise

    async def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.shield(process.wait())

    async def _ready(self) -> Process:
        """A process that waits for a request."""
        process = self._process
        if process is not None and process.returncode is None:
            return process
        await self.close()
        try:
            return await self._started()
        except (OSError, WorkerEnded) as error:  # a TimeoutError is an OSError
            raise WorkerUnavailable(repr(error)) from error

    async def _started(self) -> Process:
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, cwd=self._cwd, env=self._env
        )
        if self._setup is not None:
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await _exchange(process, self._setup)
            except BaseException:
                await self.close()
                raise
        return process


async def _exchange(process: Process, request: bytes) -> Any:
    """One request and its answer. Raises `WorkerEnded`."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(request)
        await process.stdin.drain()
        (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        return json.loads(await process.stdout.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        raise WorkerEnded(await process.wait()) from None


# -------------------------------------------------------------------------------------------------
# Who uses a worker next: owners take turns, so that one with many requests delays others less.


class TooManyWait(Exception):
    """The owner has as many requests here as it may have."""


class Turns:
    """Belongs to the event loop; ``num_at_once`` have a turn at the same time.

    An owner may have ``max_requests``, those in their turn included.
    """

    def __init__(self, max_requests: float, num_at_once: int = 1) -> None:
        self._max_requests, self._num_free = max_requests, num_at_once
        self._num_of: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Begins when it is the owner's turn. Raises `TooManyWait`."""
        if self._num_of[owner] >= self._max_requests:
            raise TooManyWait
        self._num_of[owner] += 1
        try:
            if self._num_free:
                self._num_free -= 1
            else:
                await self._wait(owner)
            try:
                yield
            finally:
                self._begin_next()
        finally:
            self._num_of[owner] -= 1
            if not self._num_of[owner]:
                del self._num_of[owner]

    async def _wait(self, owner: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was this one's turn already
                self._begin_next()
            raise

    def _begin_next(self) -> None:
        """To the next owner, who is the last one then, if any waits."""
        while self._waiting:
            owner, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[owner] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
