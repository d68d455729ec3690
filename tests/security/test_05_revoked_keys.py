"""05: a key that is taken out of the file ends what it runs, and who may write the file matters."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from benchmarks import sse
from server.api.auth import KeysFileError, read_keys
from tests.server.harness import Running, receive, running, send

GONE, STAYS = "key-that-goes", "key-that-stays"
ENDLESS = {"prompt": "a", "max_tokens": 1_000_000, "ignore_eos": True}


def write(path: Path, *keys: str) -> Path:
    entry = '[[key]]\nname = "alice"\nhash = "sha256:{}"\nscopes = ["generate", "sessions"]\n'
    path.write_text("\n".join(entry.format(hashlib.sha256(k.encode()).hexdigest()) for k in keys))
    path.chmod(0o600)
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return write(tmp_path / "keys.toml", GONE, STAYS)


@pytest.fixture
async def server(keys: Path) -> AsyncIterator[Running]:
    async with running(keys_file=keys) as started:
        yield started


@pytest.mark.parametrize("path", ["/v1/stream", "/v1/responses"])
async def test_socket_of_a_revoked_key_closes_and_others_stay(
    server: Running, keys: Path, path: str
) -> None:
    url = f"ws://127.0.0.1:{server.port}{path}"
    async with (
        connect(url, additional_headers=bearer(GONE)) as gone,
        connect(url, additional_headers=bearer(STAYS)) as stays,
    ):
        for socket in (gone, stays):  # answered, so that both are at work
            await socket.send("{}")
            assert json.loads(await socket.recv())["type"] == "error"
        write(keys, STAYS)
        server.server.reload_keys()
        with pytest.raises(ConnectionClosed):
            await gone.recv()
        assert (gone.close_code, gone.close_reason) == (1008, "the key was revoked")
        await stays.send("{}")
        assert json.loads(await stays.recv())["type"] == "error"


async def test_running_request_of_a_revoked_key_ends(server: Running, keys: Path) -> None:
    url = f"ws://127.0.0.1:{server.port}/v1/stream"
    async with connect(url, additional_headers=bearer(GONE), max_queue=None) as socket:
        await send(socket, type="generate", request_id="r", **ENDLESS)
        assert (await receive(socket))["type"] == "started"
        write(keys, STAYS)
        server.server.reload_keys()
        with suppress(ConnectionClosed):
            while True:
                await socket.recv()
        assert socket.close_code == 1008


async def test_stream_of_a_revoked_key_ends_with_an_error(server: Running, keys: Path) -> None:
    body = {**ENDLESS, "stream": True}
    async with server.http.stream(
        "POST", "/v1/completions", json=body, headers=bearer(GONE)
    ) as answer:
        events = sse.read(answer.aiter_bytes())
        assert (await anext(events)).value["object"] == "text_completion"
        write(keys, STAYS)
        server.server.reload_keys()
        *_, error, done = [event async for event in events]
    assert error.value["error"]["code"] == "invalid_api_key"
    assert done.data == sse.DONE


# The file


def test_world_writable_file_is_refused(keys: Path) -> None:
    for mode in (0o602, 0o666):
        keys.chmod(mode)
        with pytest.raises(KeysFileError, match="everybody may write it"):
            read_keys(keys)


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o604, 0o620])
def test_world_readable_file_is_a_warning(
    keys: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    keys.chmod(mode)
    with caplog.at_level(logging.WARNING, "everstream.keys"):
        assert len(read_keys(keys)) == 2
    assert str(keys) in caplog.text


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_file_readable_by_owner_or_group_has_no_warning(
    keys: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    keys.chmod(mode)
    with caplog.at_level(logging.WARNING, "everstream.keys"):
        assert len(read_keys(keys)) == 2
    assert caplog.text == ""
