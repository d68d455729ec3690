"""kill -9 in the middle of a stream that began with a named state: no token is lost."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection

from model.checkpoint import load_checkpoint
from server.cli.state import read_prompt
from server.models.backend import open_backend
from server.models.build import state_in
from server.models.storage import identity_of
from server.store.states import export_state
from tests.reliability.servers import STUCK_S, ServerProcess
from tests.reliability.streams import Frame, answer, ask, socket_of
from tests.tiny import write_model

SYSTEM = "Every morning she fetched water from the well. "
WORK: dict[str, Any] = {
    "prompt": "Once upon a time there was a fox. ",
    "max_tokens": 400,
    "temperature": 0.9,
    "seed": 7,
    "ignore_eos": True,
}
#: The clients have seen so many when their server dies.
NUM_SEEN = 150


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def state(model: Path) -> bytes:
    """The file of the state after `SYSTEM`."""
    checkpoint = load_checkpoint(model)
    backend = open_backend(checkpoint, threads=1)
    identity = identity_of(checkpoint, backend)
    data = b"".join(export_state(read_prompt(backend, SYSTEM), identity))
    assert state_in(data, identity, checkpoint.config).prompt == SYSTEM
    return data


def admin(server: ServerProcess, method: str, path: str = "", data: bytes | None = None) -> Any:
    """The answer of the admin route, whatever its status."""
    url = f"{server.url}/v1/admin/states{path}"
    request = urllib.request.Request(url, data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=STUCK_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]["code"]


async def frames(socket: ClientConnection, number: int = 10_000) -> list[Frame]:
    """So many frames, or all up to the end of the request."""
    found: list[Frame] = []
    while len(found) < number:
        found.append(await answer(socket))
        assert found[-1]["type"] != "error", found[-1]
        if found[-1]["type"] in ("finished", "appended", "created"):
            break
    return found


async def answered(socket: ClientConnection, **message: Any) -> list[Frame]:
    await ask(socket, request_id="r", **message)
    return await frames(socket)


def ids(found: list[Frame]) -> list[int]:
    return [frame["token_id"] for frame in found if frame["type"] == "token"]


async def without_state(server: ServerProcess) -> list[int]:
    """What a session says that has read the text itself."""
    async with socket_of(server.stream_url) as socket:
        session = (await answered(socket, type="create"))[-1]["session"]
        await answered(socket, type="append", session=session, text=SYSTEM)
        return ids(await answered(socket, type="generate", session=session, **WORK))


async def begin(server: ServerProcess) -> list[Frame]:
    """The first frames of a kept session that begins with the state; then the client leaves."""
    async with socket_of(server.stream_url) as socket:
        await ask(socket, type="generate", request_id="r", keep=True, state="system", **WORK)
        return await frames(socket, NUM_SEEN)


async def rest(server: ServerProcess, seen: list[Frame]) -> list[int] | None:
    """What came after ``seen``; None where another server has the session still."""
    started, last = seen[0], seen[-1]
    async with socket_of(server.stream_url) as socket:
        cursor = {"session": started["session"], "epoch": started["epoch"], "last_seq": last["seq"]}
        await ask(socket, type="resume", request_id="r", **cursor)
        first = await answer(socket)
        if first["type"] == "error":
            return None
        assert first["type"] == "resumed", first
        return ids(await frames(socket))


async def test_killed_stream_continues_from_its_state(
    model: Path, state: bytes, tmp_path: Path
) -> None:
    """The state itself is deleted meanwhile: the session has it as its first snapshot."""
    flags = ("--model", model, "--store", tmp_path / "store", "--threads", "1")
    with ServerProcess(*flags) as server:
        digest = admin(server, "POST", "?name=system", state)["digest"]
        wanted = await without_state(server)
        assert len(wanted) == WORK["max_tokens"]
        seen = await begin(server)
        server.kill()
        await asyncio.to_thread(server.start)
        (entry,) = admin(server, "GET")["data"]
        assert (entry["name"], entry["digest"]) == ("system", digest)
        assert admin(server, "DELETE", "/system") == {"name": "system", "deleted": True}
        assert [*ids(seen), *(await rest(server, seen) or ())] == wanted
        server.kill()
        await asyncio.to_thread(server.start)
        assert admin(server, "GET")["data"] == []
        assert admin(server, "GET", "/system") == "state_not_found"
        async with socket_of(server.stream_url) as socket:
            session, at = seen[0]["session"], seen[0]["position"]
            await ask(socket, type="rewind", request_id="r", session=session, at=at)
            assert (await answer(socket))["type"] == "rewound"
            assert ids(await answered(socket, type="generate", session=session, **WORK)) == wanted
