"""Answers that may become large: bounded before work starts, and written outside the event loop.

The size of an answer is estimated from what its request asks for. One that may exceed the
bound is refused with 400. An answer reserves its size while it is made, so that all of them
together have a bound as well, and each tenant has its share.

What has to be computed in one go is written by one thread, part by part. Answers take turns
there, and the event loop only ever waits for the interpreter's lock.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from server.errors import QueueFull, invalid

#: Estimates, in bytes of JSON: the text of a token, a token with its log-probability, and a
#: number of an embedding.
TOKEN_BYTES = 8
#: Of an id in a list, as JSON.
ID_BYTES = 8
LOGPROB_BYTES = 80
FLOAT_BYTES = 22

#: All answers of a model may take so many times the bound of one; a tenant's, half of that.
AT_ONCE = 4

#: A smaller answer is written in the event loop: it takes less time than a thread costs.
MAX_INLINE_BYTES = 1 << 16

T = TypeVar("T")


class LargeAnswers:
    """The bounds on the answers of one model, and the thread that writes the large ones.

    All but the thread belongs to the event loop.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._reserved: Counter[str] = Counter()
        self._thread = ThreadPoolExecutor(1, "answers")

    def check(self, num_bytes: int, param: str, fields: str) -> None:
        """Raises `InvalidRequest` that names ``param`` where an answer may become too large.

        ``fields`` are those that its size depends on.
        """
        if num_bytes > self._max_bytes:
            raise invalid(
                param,
                f"the answer may take {num_bytes} bytes, and the bound is {self._max_bytes} "
                f"(EVERSTREAM_MAX_ANSWER_BYTES); it grows with {fields}",
            )

    @contextmanager
    def reserve(self, owner: str, num_bytes: int) -> Iterator[None]:
        """Held while an answer is made. Raises `QueueFull` where there are too many large ones."""
        max_bytes = AT_ONCE * self._max_bytes
        num_bytes = min(num_bytes, max_bytes)  # a response that is stored may be larger
        is_first = not self._reserved[owner]
        its_share = is_first or self._reserved[owner] + num_bytes <= max_bytes // 2
        if not its_share or self._reserved.total() + num_bytes > max_bytes:
            raise QueueFull("too many large answers are being made; try again later")
        self._reserved[owner] += num_bytes
        try:
            yield
        finally:
            self._reserved[owner] -= num_bytes
            if not self._reserved[owner]:
                del self._reserved[owner]

    async def run(self, call: Callable[[], T]) -> T:
        """The result of a short computation in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def parts(self, parts: Iterator[bytes], num_bytes: int) -> AsyncIterator[bytes]:
        """Those of ``parts`` that are not empty, computed in the thread where they may be large.

        An empty part is where other answers may have their turn.
        """
        if num_bytes <= MAX_INLINE_BYTES:
            for part in parts:
                yield part
            return

        def following() -> bytes | None:
            return next(parts, None)

        while (found := await self.run(following)) is not None:
            if found:
                yield found

    def close(self) -> None:
        """Ends the thread; what is in it is not needed any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
