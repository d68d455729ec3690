"""Copies of a store made while a server streams: each continues to the same text elsewhere."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from pathlib import Path

import pytest

from server.cli.store import backup_command
from server.store.sqlite.maintenance import problems, renew_id
from tests.docs.pages import page
from tests.postgres import Postgres, binaries
from tests.reliability.history import History
from tests.reliability.odometer import Odometer
from tests.reliability.servers import ServerProcess
from tests.reliability.soloist import check_alone
from tests.reliability.streams import (
    ENDLESS,
    KeptStream,
    answer_of,
    ask,
    kept_streams,
    log_over_http,
    place_of,
    run_all,
    socket_of,
    tiny_server,
)
from tests.s3_server import S3Server
from tests.tiny import write_model
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(600)

SAVE_OFTEN = {"EVERSTREAM_SAVE_INTERVAL_TOKENS": "16"}
#: The commands of the page, without those that start a server.
BLOCKS = [
    re.sub(r"(?m)^.*everstream serve.*\n", "", block)
    for block in re.findall(r"(?ms)^```sh\n(.*?)^```", page("backup.md"))
]


def block_with(words: str) -> str:
    (block,) = [block for block in BLOCKS if words in block]
    return block


def shell(block: str, folder: Path, **environment: object) -> None:
    """Runs commands of the page; a statement of psql that fails is a failure."""
    path = f"{binaries()}:{os.environ['PATH']}"
    more = {name: str(value) for name, value in environment.items()}
    done = subprocess.run(
        ["bash", "-ec", block.replace("psql ", "psql --quiet --set ON_ERROR_STOP=1 ")],
        cwd=folder,
        env={**os.environ, "PATH": path, **more},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    server.start()
    yield server
    server.close()


async def copied_while_they_stream(
    server: ServerProcess,
    streams: list[KeptStream],
    odometer: Odometer,
    states: Callable[[], Set[str]],
    copies: Sequence[Callable[[], object]],
) -> None:
    """Each copy is made when new ``states`` were saved; the streams end when all are made."""
    running = asyncio.create_task(run_all(streams, server.stream_url))
    await odometer.reach(1)
    for copy in copies:
        known = states()
        await eventually(lambda known=known: len(states() - known) >= len(streams))
        await asyncio.to_thread(copy)
    await odometer.reach(odometer.num_tokens + 20 * len(streams))
    for stream in streams:
        await stream.cancel()
    await running


def states_in(postgres: Postgres, database: str) -> set[str]:
    """Those that a session of the one model in a database has."""
    schemas = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, 'everstream')"
    schema = postgres.psql(schemas, database).strip()
    return set(postgres.psql(f'SELECT file FROM "{schema}".snapshot', database).split())


async def check_copy(server: ServerProcess, streams: list[KeptStream]) -> None:
    """Every session goes on where the copy ends, with the tokens of the original."""
    for tokens, stream in zip(
        await asyncio.gather(*(continued(server, stream) for stream in streams)),
        streams,
        strict=True,
    ):
        num = min(len(tokens), len(stream.tokens))
        assert tokens[:num] == stream.tokens[:num], stream.name


async def continued(server: ServerProcess, stream: KeptStream) -> list[int]:
    """All that the copy has of a session, and 40 tokens that come after it."""
    async with socket_of(server.stream_url) as socket:
        await ask(socket, type="resume", request_id="again", **place_of(stream))
        resumed = await answer_of(socket, "resumed")
        assert resumed["busy"], resumed
        assert resumed["last_seq"]
        frames = [await answer_of(socket, "token") for _ in range(resumed["last_seq"] + 40)]
    return [frame["token_id"] for frame in frames]


async def check_reset(server: ServerProcess, stream: KeptStream) -> None:
    """A cursor of the original is of another history; the session itself is there."""
    async with socket_of(server.stream_url) as socket:
        await ask(socket, type="resume", request_id="again", **place_of(stream))
        reset = await answer_of(socket, "reset")
    assert (reset["type"], reset["session"]) == ("reset", stream.session)


async def test_copies_of_a_folder_continue_to_the_same_text(tmp_path: Path, long: bool) -> None:
    num_copies, num_streams = (40, 16) if long else (3, 4)
    history, odometer, model = History(), Odometer(), tmp_path / "model"
    streams = kept_streams(num_streams, history, odometer, max_tokens=ENDLESS)
    copies = [tmp_path / f"copy{number}" for number in range(num_copies)]
    store = tmp_path / "store"

    def states() -> set[str]:
        return {str(file) for file in (store / "snapshots").glob("*/*")}

    with tiny_server(tmp_path, environment=SAVE_OFTEN) as server:
        makers = [partial(backup_command, store, copy) for copy in copies]
        await copied_while_they_stream(server, streams, odometer, states, makers)
        log = await log_over_http(server.url, [stream.session for stream in streams])
    check_alone(streams, history, log, model)
    for copy in copies:
        assert list(problems(copy)) == []
        with ServerProcess("--model", model, "--store", copy) as server:
            await check_copy(server, streams)
    renew_id(copies[0])
    with ServerProcess("--model", model, "--store", copies[0]) as server:
        await check_reset(server, streams[0])


@pytest.mark.parametrize("has_bucket", [False, True], ids=["database", "object_storage"])
async def test_dump_of_a_database_continues_to_the_same_text(
    has_bucket: bool, tmp_path: Path, postgres: Postgres, s3: S3Server
) -> None:
    """By the page's commands. The states of the moment of the dump are copied after it."""
    model, urls = write_model(tmp_path / "model"), [postgres.new_database() for _ in range(3)]
    history, odometer = History(), Odometer()
    streams = kept_streams(4, history, odometer, max_tokens=ENDLESS)
    buckets = [s3.new_bucket() for _ in range(2)]

    def server_of(url: str, bucket: str) -> ServerProcess:
        place = {"EVERSTREAM_STORE_OBJECTS": f"s3://{bucket}/states", **s3.environment}
        environment = {"EVERSTREAM_STORE": url, **(place if has_bucket else {}), **SAVE_OFTEN}
        return ServerProcess("--model", model, environment=environment)

    def dump() -> None:
        shell(block_with("pg_dump"), tmp_path, EVERSTREAM_STORE=urls[0])
        s3.copy(*buckets)

    def states() -> set[str]:
        if has_bucket:
            return s3.objects(buckets[0])
        return states_in(postgres, urls[0].rpartition("/")[2])

    with server_of(urls[0], buckets[0]) as server:
        await copied_while_they_stream(server, streams, odometer, states, [dump])
    assert bool(s3.objects(buckets[1])) == has_bucket
    restore, another = block_with("pg_restore").split("\n", 1)
    for url in urls[1:]:
        shell(restore, tmp_path, RESTORED_STORE=url)
    with server_of(urls[1], buckets[1]) as server:
        await check_copy(server, streams)
    shell(another, tmp_path, RESTORED_STORE=urls[2])
    with server_of(urls[2], buckets[1]) as server:
        await check_reset(server, streams[0])
