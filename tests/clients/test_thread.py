"""The plain client's thread: whose calls it runs, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from clients.python import Client, ConnectionLost
from clients.python.thread import LoopThread
from tests.waiting import started_task

FORGETFUL = """
import sys
from clients.python import Client
client = Client(sys.argv[1])
generation = client.generate("Once", max_tokens=1_000_000, ignore_eos=True)
print(next(generation).seq)
"""


async def number(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_results_and_errors_come_back() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    thread = LoopThread()
    assert thread.run(number(3)) == 3
    with pytest.raises(ZeroDivisionError):
        thread.run(fail())
    thread.stop()
    with pytest.raises(ConnectionLost, match="client was closed"):
        thread.run(number(3))


def test_context_managers_and_iterators_run_in_the_loop() -> None:
    seen: list[str] = []

    @asynccontextmanager
    async def block() -> AsyncIterator[int]:
        try:
            yield 5
        except KeyError:
            seen.append("swallowed")
        finally:
            seen.append("left")

    async def items() -> AsyncIterator[int]:
        for value in range(3):
            yield value

    thread = LoopThread()
    assert list(thread.iterate(items())) == [0, 1, 2]
    with thread.entered(block()) as value:
        assert value == 5
    with thread.entered(block()):
        raise KeyError
    assert seen == ["left", "swallowed", "left"]
    thread.stop()


def test_thread_ends_with_its_last_user_and_cancels_what_runs() -> None:
    cancelled, before = threading.Event(), set(threading.enumerate())

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def begin() -> None:
        tasks.append(await started_task(wait()))

    tasks: list[asyncio.Task[None]] = []
    thread = LoopThread()
    thread.run(begin())
    (own,) = set(threading.enumerate()) - before
    del thread
    gc.collect()
    assert cancelled.is_set()
    assert not own.is_alive()


def test_threads_share_a_client(server_url: str) -> None:
    options = {"max_tokens": 12, "ignore_eos": True}
    with Client(server_url, timeout_s=60) as client, ThreadPoolExecutor(4) as pool:

        def text(seed: int) -> str:
            return client.generate("Once", seed=seed, **options).text()  # type: ignore[arg-type]

        assert list(pool.map(text, range(8))) == [text(seed) for seed in range(8)]


def test_client_may_be_closed_twice(server_url: str) -> None:
    client = Client(server_url)
    assert client.health()
    client.close()
    client.close()
    with pytest.raises(ConnectionLost, match="client was closed"):
        client.complete("x")


def test_program_that_closes_nothing_exits_without_warnings(server_url: str) -> None:
    command = [sys.executable, "-c", FORGETFUL, server_url]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert (done.stdout, done.stderr) == ("1\n", "")
