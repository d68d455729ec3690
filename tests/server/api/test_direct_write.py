"""Tokens take the short way where there is one, and arrive in order by whichever way they go."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from server.api.answers import WRITE_EXTENSION, StreamAnswer, writer_of
from server.api.auth import Keyring
from server.api.connections import SocketEndpoint, Sockets
from server.api.openai.completions import CompletionWriter, Shown
from server.api.schemas.requests import StreamOptions
from server.api.stream import StreamCodec
from server.config import ServerConfig
from server.engine.types import Event, Request, SamplingParams, TokenEvent
from server.models.registry import Models
from server.models.service import Service
from server.observability.metrics import Metrics
from server.runtime.async_engine import AsyncEngine
from server.store.sqlite.store import MemoryStore
from tests.fakes import FakeEngine
from tests.server.harness import InStep
from tests.server.one_model import only

NUM_TOKENS = 200


class Peer:
    """An ASGI server of one connection. It refuses the n-th short write if ``refuse[n]``."""

    def __init__(self, refuse: Sequence[bool]) -> None:
        self.received = b""
        self.num_short = self.num_long = 0
        self.ended = asyncio.Event()
        self._refuse = itertools.cycle(refuse)
        self._hesitates = any(refuse)
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def write(self, parts: Sequence[bytes]) -> bool:
        if next(self._refuse):
            return False
        self.num_short += 1
        self._keep(b"".join(parts))
        return True

    async def send(self, message: Any) -> None:
        if self._hesitates:
            await asyncio.sleep(0)
        data = message.get("body") or message.get("text", "").encode()
        self.num_long += bool(data)
        self._keep(data)

    async def receive(self) -> Any:
        return await self._messages.get()

    def tell(self, **message: Any) -> None:
        self._messages.put_nowait(message)

    def seqs(self) -> list[int]:
        return [int(found) for found in re.findall(rb'"seq":([1-9]\d*)', self.received)]

    def _keep(self, data: bytes) -> None:
        self.received += data
        if b"[DONE]" in data or b'"finished"' in data:
            self.ended.set()


@asynccontextmanager
async def serving(in_step: bool = False) -> AsyncIterator[Service]:
    """``in_step``: each token finds its reader waiting, which has written the last one."""
    engine = FakeEngine(before_step=InStep()) if in_step else FakeEngine()
    async_engine = AsyncEngine(engine, time.monotonic, Metrics(), MemoryStore())
    await async_engine.start()
    config = ServerConfig(max_prompt_tokens=100, max_tokens_limit=1000)
    yield only(async_engine, config).default
    await async_engine.stop()


class Writer(CompletionWriter):
    """Writes the numbers of tokens alone."""

    def __init__(self, request: Request) -> None:
        super().__init__((request,), "fake", 0)

    def token(self, event: TokenEvent) -> bytes:
        return b'"seq":%d ' % event.seq

    def chunks(self, event: Event) -> bytes:
        return self.token(event) if isinstance(event, TokenEvent) else b""


async def stream_events(peer: Peer, scope: dict[str, Any], in_step: bool = False) -> None:
    async with serving(in_step) as service:
        request = Request("r", "me", (1,), SamplingParams(max_tokens=NUM_TOKENS))
        await StreamAnswer(service, request, Writer(request))(scope, peer.receive, peer.send)


async def stream_frames(peer: Peer, scope: dict[str, Any], in_step: bool = False) -> None:
    async with serving(in_step) as service:
        scope |= {
            "type": "websocket",
            "state": {"caller": Keyring().caller(None)},
            "subprotocols": [],
        }
        message = {"type": "generate", "request_id": "a", "prompt": "hi", "max_tokens": NUM_TOKENS}
        peer.tell(type="websocket.connect")
        peer.tell(type="websocket.receive", text=json.dumps(message))
        endpoint = SocketEndpoint(Models.only(service), Sockets(), StreamCodec)
        served = asyncio.create_task(endpoint(scope, peer.receive, peer.send))
        await peer.ended.wait()
        peer.tell(type="websocket.disconnect")
        await served


@pytest.mark.parametrize("stream", [stream_events, stream_frames])
@pytest.mark.parametrize("refuse", ["0", "1", "01", "0010111"])
async def test_events_stay_in_order_if_writes_are_refused(stream: Any, refuse: str) -> None:
    peer = Peer([digit == "1" for digit in refuse])
    await stream(peer, {"extensions": {WRITE_EXTENSION: peer.write}})
    assert peer.seqs()[:NUM_TOKENS] == list(range(1, NUM_TOKENS + 1))


@pytest.mark.parametrize("refuse", ["0", "1", "01", "0010111"])
async def test_writer_that_counts_makes_each_chunk_once(refuse: str) -> None:
    peer = Peer([digit == "1" for digit in refuse])
    request = Request("r", "me", (1,), SamplingParams(max_tokens=NUM_TOKENS))
    writer = CompletionWriter(
        (request,), "fake", 0, shown=Shown(options=StreamOptions(continuous_usage_stats=True))
    )
    async with serving() as service:
        answer = StreamAnswer(service, request, writer)
        await answer({"extensions": {WRITE_EXTENSION: peer.write}}, peer.receive, peer.send)
    counts = [int(found) for found in re.findall(rb'"completion_tokens":(\d+)', peer.received)]
    assert counts[:NUM_TOKENS] == list(range(1, NUM_TOKENS + 1))


@pytest.mark.parametrize("stream", [stream_events, stream_frames])
async def test_tokens_wake_no_task_while_the_peer_reads(stream: Any) -> None:
    peer = Peer([False])
    await stream(peer, {"extensions": {WRITE_EXTENSION: peer.write}}, in_step=True)
    assert peer.num_long <= 4
    assert peer.num_short > 4


@pytest.mark.parametrize("stream", [stream_events, stream_frames])
async def test_server_without_the_shortcut_gets_all_by_send(stream: Any) -> None:
    peer = Peer([False])
    await stream(peer, {})
    assert peer.seqs()[:NUM_TOKENS] == list(range(1, NUM_TOKENS + 1))
    assert peer.num_short == 0


def test_scope_without_the_shortcut_refuses_every_write() -> None:
    assert not writer_of({"type": "http"})([b"x"])
