"""Real servers that share a database: through a pooler, with states in a bucket, rebalanced."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.pgbouncer import PgBouncer, needs_pgbouncer
from tests.postgres import Postgres
from tests.reliability.servers import STUCK_S, ServerProcess
from tests.reliability.streams import ENDLESS
from tests.s3_server import S3Server
from tests.tiny import write_model

NUM_TOKENS = 150


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


class Reader:
    """One session, wherever it is: each event once, and none missing."""

    def __init__(self) -> None:
        self.session = self.epoch = ""
        self.tokens: list[int] = []
        self.frames: list[str] = []
        self._socket: ClientConnection | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        if self._socket is not None:
            await self._socket.close()

    async def begin(self, server: ServerProcess, **headers: str) -> None:
        self._socket = await connect(
            server.stream_url, additional_headers=headers, open_timeout=STUCK_S, max_queue=None
        )
        work = {
            "type": "generate",
            "request_id": "r",
            "prompt": "Once",
            "keep": True,
            "ignore_eos": True,
        }
        await self._socket.send(json.dumps(work | {"max_tokens": ENDLESS}))
        assert await self.read()

    async def resume(self, server: ServerProcess) -> None:
        """As soon as it is possible."""
        while True:
            await self.leave()
            self._socket = await connect(server.stream_url, open_timeout=STUCK_S, max_queue=None)
            place = {"session": self.session, "epoch": self.epoch, "last_seq": len(self.tokens)}
            await self._socket.send(json.dumps({"type": "resume", "request_id": "r"} | place))
            if await self.read():
                return

    async def read(self, number: int = NUM_TOKENS) -> bool:
        """``number`` more tokens; False where they are not available, perhaps not yet."""
        until = len(self.tokens) + number
        async with asyncio.timeout(STUCK_S):
            while len(self.tokens) < until:
                if not await self.read_one():
                    return False
        return True

    async def read_one(self) -> bool:
        assert self._socket is not None
        frame = json.loads(await self._socket.recv())
        if frame["type"] == "error":
            assert frame["error"]["code"] in ("session_elsewhere", "session_attached"), frame
            return False
        self.note(frame)
        return True

    async def close_code(self) -> int | None:
        """Reads to the end."""
        with suppress(ConnectionClosed):
            async with asyncio.timeout(STUCK_S):
                while True:
                    await self.read_one()
        return None if self._socket is None else self._socket.close_code

    def note(self, frame: dict[str, Any]) -> None:
        self.frames.append(frame["type"])
        if frame["type"] == "started":
            self.session, self.epoch = frame["session"], frame["epoch"]
        elif frame["type"] == "token":
            assert frame["seq"] == len(self.tokens) + 1
            self.tokens.append(frame["token_id"])


@needs_pgbouncer
async def test_a_pooler_may_stand_in_between(
    model: Path, postgres: Postgres, database_url: str, stack: ExitStack
) -> None:
    """In transaction mode; what shows that a replica lives goes to the database itself."""
    pooler = stack.enter_context(closing(PgBouncer(postgres)))
    flags = ("--model", model, "--store", pooler.url(database_url))
    direct = {"EVERSTREAM_STORE_DIRECT": database_url}
    one, other = (stack.enter_context(ServerProcess(*flags, environment=direct)) for _ in range(2))
    async with Reader() as reader:
        await reader.begin(one)
        await reader.resume(other)
        other.kill()
        await reader.resume(one)
    assert one.get("/ready")[0] == 200


async def test_stream_is_followed_at_another_replica_without_moving_the_session(
    model: Path, database_url: str, stack: ExitStack
) -> None:
    flags = ("--model", model, "--store", database_url)
    one, other = (stack.enter_context(ServerProcess(*flags)) for _ in range(2))
    async with Reader() as reader, httpx.AsyncClient(timeout=STUCK_S) as http:
        await reader.begin(one)
        url = f"{other.url}/v1/sessions/{reader.session}/stream"
        seqs, offset = list[int](), "-1"
        while len(seqs) < 2 * NUM_TOKENS:  # more than there was at first
            answer = await http.get(url, params={"live": "long-poll", "offset": offset})
            offset = answer.headers["stream-next-offset"]
            messages = answer.json() if answer.status_code == 200 else []
            seqs += [each["seq"] for each in messages if each["type"] == "token"]
            await reader.read(10)
        assert seqs == [*range(1, len(seqs) + 1)]
        await reader.read()
        assert set(reader.frames[1:]) == {"token"}


async def test_states_may_be_in_object_storage(
    model: Path, postgres: Postgres, database_url: str, stack: ExitStack
) -> None:
    storage = stack.enter_context(closing(S3Server()))
    storage.start()
    bucket = storage.new_bucket()
    environment = storage.environment | {
        "EVERSTREAM_STORE_OBJECTS": storage.url(bucket),
        "EVERSTREAM_SAVE_INTERVAL_TOKENS": "64",
    }
    flags = ("--model", model, "--store", database_url)
    one, other = (
        stack.enter_context(ServerProcess(*flags, environment=environment)) for _ in range(2)
    )
    async with Reader() as reader:
        await reader.begin(one)
        while not storage.objects(bucket):
            await reader.read()
        one.kill()
        await reader.resume(other)
    database = database_url.rpartition("/")[2]
    schema = postgres.psql(
        "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'everstream%'", database
    ).strip()
    assert postgres.psql(f'SELECT count(*) FROM "{schema}".object', database).strip() == "0"


async def test_streams_continue_while_object_storage_is_unavailable(
    model: Path, postgres: Postgres, database_url: str, stack: ExitStack
) -> None:
    """States are in the database then."""
    storage = stack.enter_context(closing(S3Server()))
    storage.start()
    bucket = storage.new_bucket()
    environment = storage.environment | {
        "EVERSTREAM_STORE_OBJECTS": storage.url(bucket),
        "EVERSTREAM_SAVE_INTERVAL_TOKENS": "16",
    }
    flags = ("--model", model, "--store", database_url)
    one, other = (
        stack.enter_context(ServerProcess(*flags, environment=environment)) for _ in range(2)
    )
    async with Reader() as reader:
        await reader.begin(one)
        storage.kill()
        while f"writing states to the database: bucket {bucket}: " not in one.log():
            await reader.read()
        await reader.read()
        storage.start()
        one.kill()
        await reader.resume(other)
        await reader.read()


async def test_an_operator_moves_streams_elsewhere(
    model: Path, database_url: str, stack: ExitStack
) -> None:
    flags = ("--model", model, "--store", database_url)
    one = stack.enter_context(ServerProcess(*flags, "--admin-key", "root", "--api-key", "user"))
    async with Reader() as reader:
        await reader.begin(one, Authorization="Bearer user")
        assert await asyncio.to_thread(_rebalance, one, 5) == 1
        assert await reader.close_code() == 1012
        assert reader.frames[-1] == "migrate"


def _rebalance(server: ServerProcess, number: int) -> int:
    request = urllib.request.Request(
        f"{server.url}/v1/admin/rebalance",
        json.dumps({"sessions": number}).encode(),
        {"Authorization": "Bearer root", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(json.load(answer)["moved"])


def test_unavailable_database_is_one_error_line(model: Path) -> None:
    url = "postgresql://nobody:secret@127.0.0.1:1/nothing"
    server = ServerProcess("--model", model, "--store", url)
    with pytest.raises(AssertionError) as refused, server:
        pass
    assert "--store: the shared store failed" in str(refused.value)
    assert "secret" not in str(refused.value)
