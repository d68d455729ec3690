"""A server with a folder to load models from, and what its admin routes answer."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.server.harness import receive_until, send
from tests.server.served import ENDLESS, Served, served
from tests.tiny import write_model

LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.9, "seed": 7}


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Served]:
    """The model in ``folder/a``, and a folder to load others from."""
    write_model(folder / "a")
    settings = {"store": str(folder / "store"), "model_dir": folder, **settings}
    async with served(str(folder / "a"), **settings) as server:
        yield server


async def post(server: Served, path: str, /, **body: Any) -> httpx.Response:
    return await server.http.post(f"/v1/admin/models{path}", json=body)


async def reload(server: Served, **body: Any) -> dict[str, Any]:
    answer = await post(server, "/a/reload", **body)
    assert answer.status_code == 200, answer.text
    reloaded: dict[str, Any] = answer.json()
    return reloaded


@asynccontextmanager
async def old_version_running(server: Served, folder: Path) -> AsyncIterator[None]:
    """Other weights are served; those before them still run a request, which ends at the end."""
    async with server.socket() as socket:
        await send(socket, type="generate", request_id="r", prompt="Once", **ENDLESS)
        await receive_until(socket, "token")
        write_model(folder / "a", seed=1)
        await reload(server)
        yield
        await send(socket, type="cancel", request_id="r")
        await receive_until(socket, "finished")
    await server.retired()


def ids_of(frames: list[dict[str, Any]], name: str = "r") -> list[int]:
    """The tokens of a request."""
    tokens = [frame for frame in frames if frame["type"] == "token"]
    return [token["token_id"] for token in tokens if token["request_id"] == name]


async def statuses(server: Served) -> list[tuple[str, str]]:
    data = (await server.http.get("/v1/admin/models")).json()["data"]
    return [(version["name"], version["status"]) for version in data]


def engines() -> list[str]:
    """The threads of engines and stores. Those of the loop's own pool come as they like."""
    names = sorted(thread.name for thread in threading.enumerate())
    return [name for name in names if name in ("engine", "store")]
