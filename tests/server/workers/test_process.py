"""A worker answers one request at a time, and what prevents an answer costs its process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from server.workers.process import ROOT, WorkerEnded, WorkerProcess, WorkerUnavailable
from tests.waiting import started_task

pytestmark = pytest.mark.process

#: Answers with what it got and its environment; "exit" and "wait" are obeyed.
PROGRAM = """
import os, sys, time
from server.workers.frames import read_frame, write_frame
while (request := read_frame(sys.stdin.buffer)) is not None:
    if request == "exit":
        sys.exit(3)
    if request == "wait":
        time.sleep(60)
    write_frame(sys.stdout.buffer, [request, sorted(os.environ)])
"""
ENV = {"MINE": "1", "LC_CTYPE": "C.UTF-8"}  # Python sets the latter where it is missing


@pytest.fixture
async def worker() -> AsyncIterator[WorkerProcess]:
    made = WorkerProcess((sys.executable, "-c", PROGRAM), ENV, ROOT)
    yield made
    await made.close()


async def test_worker_starts_with_the_first_request_and_stays(worker: WorkerProcess) -> None:
    assert worker.pid is None
    assert await worker.ask({"é": "\ud800"}) == [{"é": "\ud800"}, sorted(ENV)]
    pid = worker.pid
    assert (await worker.ask([1]))[0] == [1]
    assert worker.pid == pid is not None


async def test_a_dead_worker_is_replaced(worker: WorkerProcess) -> None:
    with pytest.raises(WorkerEnded) as ended:
        await worker.ask("exit")
    assert ended.value.code == 3
    assert worker.pid is None
    assert (await worker.ask("again"))[0] == "again"
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerEnded) as killed:
        await worker.ask("x")
    assert killed.value.code == -signal.SIGKILL
    assert (await worker.ask("more"))[0] == "more"


async def test_late_answer_ends_the_process(worker: WorkerProcess) -> None:
    await worker.ask("ready")
    pid = worker.pid
    with pytest.raises(TimeoutError):
        await worker.ask("wait", timeout_s=0.1)
    assert (await worker.ask("next"))[0] == "next"
    assert worker.pid not in (None, pid)


async def test_a_cancelled_request_leaves_no_answer_behind(worker: WorkerProcess) -> None:
    await worker.ask("ready")
    asked = await started_task(worker.ask("wait"))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert (await worker.ask("mine"))[0] == "mine"


async def test_close_ends_a_request_that_is_in_the_worker(worker: WorkerProcess) -> None:
    await worker.ask("ready")
    asked = await started_task(worker.ask("wait"))
    await worker.close()
    with pytest.raises(WorkerEnded):
        await asked


async def test_setup_is_the_first_request_of_each_process() -> None:
    ended = WorkerProcess((sys.executable, "-c", PROGRAM), ENV, ROOT, setup="exit")
    with pytest.raises(WorkerUnavailable):
        await ended.ask("x")
    assert ended.pid is None
    missing = WorkerProcess(("/no/such/program",), ENV)
    with pytest.raises(WorkerUnavailable):
        await missing.ask("x")
