"""The real server on a real port in the test's own event loop, over a fake engine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection, connect

from model.chat import ChatTemplate
from server.api.app import create_app
from server.api.schemas.responses import AnyFrame
from server.config import ServerConfig
from server.constraints.compiler import FormatCompiler
from server.engine.session import SessionValue
from server.engine.types import EngineStats, Request, SamplingParams
from server.http.protocols import HttpProtocol
from server.http.server import PING_TIMEOUT_S, TCP_USER_TIMEOUT_MS, Server, bind
from server.models.service import ModelInfo
from server.observability.metrics import Metrics
from server.runtime.async_engine import AsyncEngine
from server.store.base import Store
from server.store.sqlite.store import MemoryStore
from tests.fakes import MODEL, ByteTokenizer, FakeEngine
from tests.reliability.servers import STUCK_S, socket_to
from tests.server.one_model import only
from tests.waiting import eventually

_FRAME: TypeAdapter[AnyFrame] = TypeAdapter(AnyFrame)


class Gate:
    """Holds an engine before each step until the test lets it go."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self._reached = threading.Event()
        self._open = False

    def __call__(self) -> None:
        self._reached.set()
        if not self._open:
            self._steps.acquire()

    async def reached(self) -> None:
        """Returns when the engine stands before its first step, or has passed it."""
        assert await asyncio.to_thread(self._reached.wait, STUCK_S)

    def allow(self, num_steps: int = 1) -> None:
        self._steps.release(num_steps)

    def open(self) -> None:
        self._open = True
        self._steps.release()


class InStep:
    """Lets an engine take a step only after the event loop has done what came before it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> None:
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        turned.wait(STUCK_S)


class Recorder(FakeEngine):
    """Remembers the sampling of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.sampling: list[SamplingParams | None] = []

    def submit(self, request: Request, now: float, start: SessionValue | None = None) -> None:
        self.sampling.append(request.sampling)
        super().submit(request, now, start)


class PromptServer(Server):
    """Does without uvicorn's pause of 0.1 s for its connections where it has none."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for closed in (*self._acceptors, *(sockets or ())):
            closed.close()
        await self.lifespan.shutdown()


@dataclass(frozen=True)
class Running:
    """A server at work. Ends with ``http`` closed and the engine's thread joined."""

    server: Server
    async_engine: AsyncEngine
    http: httpx.AsyncClient
    port: int
    done: asyncio.Task[None]

    def socket(self, **options: Any) -> connect:
        return socket_to(f"ws://127.0.0.1:{self.port}/v1/stream", **options)

    async def generate(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json=body)

    async def stats(self) -> EngineStats:
        """The counts after the step in which what was asked for before takes effect."""
        await self.async_engine.stats()
        return await self.async_engine.stats()

    async def until_disconnected(self) -> None:
        """Returns when the server has no connection left, with or without the client's help."""

        async def are_gone() -> bool:
            return not self.server.server_state.connections

        await eventually(are_gone)

    async def until_slots_are_free(self) -> None:
        """Returns when no session has a slot: a cancel is obeyed at the end of a step."""

        async def are_free() -> bool:
            return not (await self.stats()).held_slots

        await eventually(are_free)

    async def exchange(self, data: bytes) -> bytes:
        """Sends ``data`` as it is, and reads until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        try:
            async with asyncio.timeout(STUCK_S):
                return await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def running(
    engine: FakeEngine | None = None,
    ping_timeout_s: float = PING_TIMEOUT_S,
    user_timeout_ms: int = TCP_USER_TIMEOUT_MS,
    http_protocol: type[HttpProtocol] = HttpProtocol,
    store: Store | None = None,
    chat_template: ChatTemplate | None = None,
    constraints: FormatCompiler | None = None,
    tokenizer: ByteTokenizer | None = None,
    model: ModelInfo = MODEL,
    **settings: Any,
) -> AsyncIterator[Running]:
    # Without heartbeats: a machine that is busy for long must not change what a stream has.
    config = ServerConfig(**{"heartbeat_s": 0, **settings})
    listener = bind("127.0.0.1", 0, user_timeout_ms)
    port = listener.getsockname()[1]
    async_engine = AsyncEngine(
        engine or FakeEngine(), time.monotonic, Metrics(), store or MemoryStore()
    )
    models = only(
        *(async_engine, config),
        model=model,
        chat_template=chat_template,
        constraints=constraints,
        tokenizer=tokenizer,
    )
    app = create_app(models, config, "0.0.0")
    server = PromptServer(app, config, ping_timeout_s, http_protocol)
    done = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{port}"
    # Without HTTPS: reading the certificates of the world takes 20 ms of processor time.
    async with httpx.AsyncClient(base_url=url, timeout=STUCK_S, verify=False) as http:
        yield Running(server, async_engine, http, port, done)
        await http.aclose()
        await asyncio.sleep(0)  # so that the server sees the end of its connections
        await asyncio.sleep(0)
        server.stop()
        server.stop()
        await done


async def send(socket: ClientConnection, **message: Any) -> None:
    await socket.send(json.dumps(message))


async def receive(socket: ClientConnection) -> dict[str, Any]:
    return checked(await socket.recv())


def checked(data: str | bytes) -> dict[str, Any]:
    """A frame of the server, which is as the AsyncAPI document says."""
    _FRAME.validate_json(data)
    message: dict[str, Any] = json.loads(data)
    return message


async def receive_until(socket: ClientConnection, type: str) -> list[dict[str, Any]]:
    """All messages up to the first one of ``type``, with it."""
    messages = [await receive(socket)]
    while messages[-1]["type"] != type:
        messages.append(await receive(socket))
    return messages
