"""``everstream serve --ray`` whose proxy passes no ``migrate`` on while a file is locked."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.cli.main import app
from server.cluster.ray import cluster

NAME = "tests.server.cluster.ray.held_proxy"
PROGRAM = (NAME, "serve", "--host", "127.0.0.1")
#: The environment's name of the file.
LOCK = "HELD_PROXY_LOCK"


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """Nothing passes within the block."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _wait() -> None:
    with Path(os.environ[LOCK]).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)


class Held:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def held_send(message: Message) -> None:
            if '"migrate"' in message.get("text", ""):
                await asyncio.to_thread(_wait)
            await send(message)

        await self._app(scope, receive, held_send)


def middlewares() -> list[Middleware]:
    """In a proxy of Ray. It imports Ray, which reads its environment then."""
    from server.cluster.ray import proxy

    return [Middleware(Held), *proxy.middlewares()]


if __name__ == "__main__":
    callback = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{NAME}:middlewares"}
    cluster.EVERYWHERE = {**cluster.EVERYWHERE, **callback}
    app()
