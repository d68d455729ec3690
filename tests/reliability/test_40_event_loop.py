"""40: no request keeps the event loop for long, whatever its body: others are answered meanwhile.

What counts is processor time, which does not depend on what else the machine does, in proportion to
what this machine needs for a known piece of work.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Mount, WebSocketRoute

from server.api.app import create_app
from server.config import ServerConfig
from server.observability.metrics import Metrics
from server.runtime.async_engine import AsyncEngine
from server.store.sqlite.store import MemoryStore
from tests.fakes import FakeEngine
from tests.reliability.largest_bodies import ANY_STATUS, BODIES, Sent
from tests.reliability.servers import STUCK_S, ServerProcess, socket_to
from tests.reliability.timed_server import Turn
from tests.server.one_model import only

#: Of the loop's thread in one turn: what others wait for at least. The longest have taken 0.1 s.
MAX_LOOP_S = 0.25
#: Of all threads between two turns: of them at most one keeps the interpreter's lock, for
#: milliseconds at a time, and others compute next to it.
MAX_PROCESS_S = 1.0
#: What `work_s` returns on the machine that these bounds are for. A slower one has more time.
WORK_S = 0.06
#: Characters of a path, a query or a header; the head may have 32 KiB.
LONG = 30_000
#: The last frame that answers a message.
ENDS = {"finished", "error", "response.completed", "response.incomplete", "response.failed"}


@pytest.fixture(scope="module")
def routes() -> list[str]:
    """Method and path of each; that of a socket is "SOCKET"."""
    config = ServerConfig(store="memory")
    async_engine = AsyncEngine(FakeEngine(), time.monotonic, Metrics(), MemoryStore())
    return sorted(_routes(create_app(only(async_engine, config), config, "0.0.0")))


def _routes(app: FastAPI) -> Iterator[str]:
    for route in app.routes:
        if isinstance(route, APIRoute):
            yield from (f"{method} {route.path}" for method in route.methods)
        elif isinstance(route, WebSocketRoute):
            yield f"SOCKET {route.path}"
        elif isinstance(route, Mount):
            yield f"GET {route.path}/{{name}}"
        else:
            yield f"GET {route.path}"  # type: ignore[attr-defined]


class TimedServer:
    """A `timed_server`, the turns that it has written since they were looked at last."""

    def __init__(self, server: ServerProcess, file: Path) -> None:
        self.server, self._file, self._num_seen = server, file, 0

    def longest(self) -> Turn:
        """The longest times of the turns since the last call."""
        lines = self._file.read_text().splitlines()
        turns, self._num_seen = [*map(Turn.read, lines[self._num_seen :])], len(lines)
        return Turn(
            max((turn.loop_s for turn in turns), default=0.0),
            max((turn.process_s for turn in turns), default=0.0),
        )


@contextmanager
def timed_server(folder: Path) -> Iterator[TimedServer]:
    file = folder / "turns"
    program = ("tests.reliability.timed_server", str(file))
    with ServerProcess(program=program) as server:
        yield TimedServer(server, file)


@contextmanager
def asked_all_the_time(server: ServerProcess) -> Iterator[list[float]]:
    """Seconds that each answer to `/health` took, while other requests are made."""
    took_s: list[float] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(0.01):
            begun_s = time.monotonic()
            assert server.get("/health")[0] == 200
            took_s.append(time.monotonic() - begun_s)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield took_s
    finally:
        ended.set()
        asking.join()


def test_each_route_that_takes_a_body_has_its_largest_ones(routes: list[str]) -> None:
    taking = {route for route in routes if route.split()[0] not in ("GET", "DELETE")}
    assert taking == BODIES.keys()


@pytest.mark.timeout(1200)
async def test_others_are_answered_while_the_largest_requests_are(
    routes: list[str], tmp_path: Path
) -> None:
    with timed_server(tmp_path) as timed:
        server = timed.server
        async with httpx.AsyncClient(base_url=server.url, timeout=STUCK_S, verify=False) as http:
            ids = await _ids(http)
            await http.get("/openapi.json")  # made once
            timed.longest()
            with asked_all_the_time(server) as took_s:
                found = {}
                for route in routes:
                    for sent in BODIES.get(route, [Sent("a long head", {}, ANY_STATUS)]):
                        await _send(server, http, route, ids, sent)
                        found[f"{route}, {sent.name}"] = timed.longest()
    slowest = sorted(found.items(), key=lambda item: -item[1].loop_s)
    for name, turn in slowest[:10]:
        print(f"{turn.loop_s:.3f} s of the loop, {turn.process_s:.3f} s of the process: {name}")
    print(f"the longest of {len(took_s)} answers of /health took {max(took_s):.2f} s")
    assert len(took_s) > 1
    slowness = max(1.0, work_s() / WORK_S)
    max_loop_s, max_process_s = MAX_LOOP_S * slowness, MAX_PROCESS_S * slowness
    assert not [
        (name, turn)
        for name, turn in found.items()
        if turn.loop_s > max_loop_s or turn.process_s > max_process_s
    ]


def work_s() -> float:
    """Seconds of processor time for a JSON of 1.5 MB, the least of some."""
    took_s = []
    for _ in range(5):
        begun_s = time.thread_time()
        json.dumps([0] * 500_000)
        took_s.append(time.thread_time() - begun_s)
    return min(took_s)


async def _ids(http: httpx.AsyncClient) -> dict[str, str]:
    """What stands for the parameters of paths: a session, a response, and long names."""
    session = (await http.post("/v1/sessions")).json()["session"]
    body = {"input": "hi", "max_output_tokens": 1}
    response = (await http.post("/v1/responses", json=body)).json()["id"]
    long = "a" * (LONG // 2)
    return {"session": session, "response_id": response, "name": long, "model": long}


async def _send(
    server: ServerProcess, http: httpx.AsyncClient, route: str, ids: dict[str, str], sent: Sent
) -> None:
    """Returns when it is answered. Raises `AssertionError` where with another status."""
    method, path = route.split()
    if method == "SOCKET":
        answered = await _answered(server, path, sent)
    elif method == "POST":
        path = re.sub(r"{(\w+)}", lambda name: ids[name[1]], path)
        answered = (await http.post(path, content=sent.data)).status_code
    else:
        # Of what is read, not of a session that is deleted.
        path = re.sub(r"{(\w+)}", "a" * (LONG // 2), path)
        query = "a=" + "&a=" * (LONG // 6)
        headers = {"if-none-match": '"a",' * (LONG // 4)} if method == "GET" else {}
        for url in (path, f"{path}?{query}"):
            answered = (await http.request(method, url, headers=headers)).status_code
            headers = {}
    assert answered < 500 and sent.status in (ANY_STATUS, answered), (route, sent.name, answered)


async def _answered(server: ServerProcess, path: str, sent: Sent) -> int:
    """The status of the last frame that answers a message."""
    async with socket_to(f"ws{server.url.removeprefix('http')}{path}", max_size=None) as socket:
        await socket.send(sent.data.decode())
        while True:
            frame: dict[str, Any] = json.loads(await asyncio.wait_for(socket.recv(), STUCK_S))
            if frame["type"] in ENDS:
                return int(frame.get("status", 200)) if frame["type"] == "error" else 200
