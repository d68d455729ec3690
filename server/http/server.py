"""The process around the app: the listening socket, its bounds, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.config import STARTUP_FAILURE

from server.api.auth import Keyring, KeysFileError
from server.api.connections import (
    DEFAULT_MAX_CONNECTIONS,
    SPARE,
    ConnectionTable,
    OpenConnection,
    Sockets,
)
from server.api.gate import MAX_HEAD_BYTES
from server.config import ServerConfig
from server.http.protocols import CountedProtocol, HttpProtocol, WebSocketProtocol
from server.models.registry import Models

# -------------------------------------------------------------------------------------------------
# Open files: how many this process may have, and how many of them may be connections.


connections_logger = logging.getLogger("everstream.connections")

#: More than any setting makes use of.
ENOUGH = 65_536
#: What macOS allows at most, whatever its hard limit says.
ENOUGH_ON_MACOS = 10_240
#: Kept from connections: for logs, child processes and databases, and for each model's store.
RESERVE = 48
RESERVE_PER_MODEL = 16


def raise_limit() -> int:
    """Raises the soft limit on open files as far as the hard one allows; returns what it is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (ENOUGH, ENOUGH_ON_MACOS):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft < target:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def with_fitting_connections(config: ServerConfig) -> ServerConfig:
    """``config`` with a bound on connections that the process's limit on open files allows."""
    limit = raise_limit()
    reserve = RESERVE + RESERVE_PER_MODEL * len(config.model)
    asked = config.max_connections or DEFAULT_MAX_CONNECTIONS
    fitting = max(1, min(asked, limit - reserve - SPARE))
    if fitting < asked:
        connections_logger.warning(
            "at most %d connections: %d open files are allowed", fitting, limit
        )
    return config.model_copy(update={"max_connections": fitting})


# -------------------------------------------------------------------------------------------------
# Accepts connections up to the bounds, and stops while the process has no descriptor left.
#
# asyncio accepts whatever comes: where descriptors run out, the store cannot open its
# files any more, and each failed accept is a line of the log.


#: In one turn of the event loop.
MAX_ACCEPTS = 16
#: How long nothing is accepted after the system had no descriptor or no memory for it.
PAUSE_S = 1.0

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """Takes connections from ``listener`` while ``table`` has room, each with a new protocol.

    What is not accepted waits in the kernel. Belongs to one event loop; `close` leaves
    the listener open.
    """

    def __init__(
        self,
        listener: socket.socket,
        table: ConnectionTable,
        make_protocol: Callable[[], CountedProtocol],
        pause_s: float = PAUSE_S,
    ) -> None:
        self._listener, self._table = listener, table
        self._make_protocol, self._pause_s = make_protocol, pause_s
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._start()

    def close(self) -> None:
        """Accepts nothing more."""
        self._loop.remove_reader(self._listener)
        if self._paused is not None:
            self._paused.cancel()

    def _start(self) -> None:
        self._paused = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            if not self._table.has_room:  # in the next turn there is, and this is called again
                self._table.close_longest_idle()
                connections_logger.warning("connection limit reached: closing idle connections")
                return
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:  # else that one connection is gone already
                if error.errno in _EXHAUSTED:
                    self._pause(error)
                    return
            else:
                self._begin(accepted, self._table.address_of_peer(address[0]))

    def _pause(self, error: OSError) -> None:
        """Others of this process need what is left more, and what an idle connection has."""
        connections_logger.warning("accepting of connections paused: %s", error.strerror)
        self._loop.remove_reader(self._listener)
        self._table.close_longest_idle()
        self._paused = self._loop.call_later(self._pause_s, self._start)

    def _begin(self, accepted: socket.socket, address: str) -> None:
        connection = self._table.add(address)
        if connection is None:
            accepted.close()
            return
        accepted.setblocking(False)
        task = self._loop.create_task(self._connect(accepted, connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, accepted: socket.socket, connection: OpenConnection) -> None:
        def make_protocol() -> CountedProtocol:
            protocol = self._make_protocol()
            protocol.connection = connection
            return protocol

        try:
            await self._loop.connect_accepted_socket(make_protocol, accepted)
        except OSError as error:
            connections_logger.warning("a connection could not be set up: %s", error.strerror)
            connection.lost()
            accepted.close()


# -------------------------------------------------------------------------------------------------
# On SIGTERM or SIGINT `/ready` answers 503 and new work is refused. Sessions that a
# store keeps are saved at the boundary of a token, and their readers are
# redirected. Other requests continue up to the drain timeout and are cancelled
# then; sockets get 1012 after their last event; the process exits 0. A second signal
# cuts it short. If the thread of an engine dies, or of a store, the process exits 1.


logger = logging.getLogger("everstream.serving")
drain_logger = logging.getLogger("everstream.drain")

# How long the kernel keeps a connection whose peer does not take its data.
TCP_USER_TIMEOUT_MS = 20_000
# The kernel doubles it. Small, so that a peer that stops reading is noticed early.
SEND_BUFFER_BYTES = 64 * 1024
# A socket is pinged at least this often, and as often as streams get comments if that is oftener.
MAX_PING_INTERVAL_S = 15.0
PING_TIMEOUT_S = 20.0
BACKLOG = 1024

CLOSE_TIMEOUT_S = 2
# After a cancel each request still ends at the boundary of a step.
CANCEL_TIMEOUT_S = 2.0
# What saving gets after a second signal: sessions that are not saved are cancelled.
HURRIED_SAVE_S = 2.0


def bind(host: str, port: int, user_timeout_ms: int = TCP_USER_TIMEOUT_MS) -> socket.socket:
    """A listening socket whose connections cannot be held by a peer that never reads.

    Raises `OSError` where the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    # asyncio sets it only where the listener names its protocol, and a token must not wait 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, user_timeout_ms)
    return listener


def serve(app: FastAPI, config: ServerConfig, listener: socket.socket) -> int:
    """Serves until a signal or the engine's death; returns the exit code of the process."""
    server = Server(app, config)

    async def until_the_end() -> None:
        await server.serve(sockets=[listener])
        for number in (signal.SIGTERM, signal.SIGHUP):  # it ends already, with a code of its own
            signal.signal(number, signal.SIG_IGN)

    with asyncio.Runner() as runner:
        runner.run(until_the_end())
    return server.exit_code


class Server(uvicorn.Server):
    """uvicorn's server under our own signals. Take ``exit_code`` after `serve`."""

    def __init__(
        self,
        app: FastAPI,
        config: ServerConfig,
        ping_timeout_s: float = PING_TIMEOUT_S,
        http: type[HttpProtocol] = HttpProtocol,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=http,
                ws=WebSocketProtocol,
                ws_max_size=config.max_message_bytes,
                ws_per_message_deflate=False,
                ws_ping_interval=min(
                    config.heartbeat_s or MAX_PING_INTERVAL_S, MAX_PING_INTERVAL_S
                ),
                ws_ping_timeout=ping_timeout_s,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
                server_header=False,
                proxy_headers=False,
                access_log=False,
                log_config=None,
                lifespan="on",
                workers=1,
            )
        )
        self.config.timeout_keep_alive = config.keep_alive_s  # type: ignore[assignment]
        self.exit_code = 0
        self._http = http
        self.servers = []  # asyncio's, which we have none of
        self._acceptors: list[Acceptor] = []
        self._connections: ConnectionTable = app.state.connections
        self._models: Models = app.state.models
        self._sockets: Sockets = app.state.sockets
        self._keyring: Keyring = app.state.keyring
        self._drain_timeout_s = config.drain_timeout_s
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    def stop(self) -> None:
        """Begins the drain; the second call ends it."""
        (self._hurry if self._stop.is_set() else self._stop).set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT call `stop`; unlike uvicorn's, they are not raised again."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self.reload_keys)
        try:
            yield
        finally:
            for number in (*signals, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def reload_keys(self) -> None:
        """Reads the keys file again; a mistake in it leaves the keys as they were."""
        try:
            self._keyring.reload()
        except KeysFileError as error:
            logger.error("the keys were not reloaded: %s", error)
        else:
            logger.info("the keys were reloaded")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the models, then accepts on ``sockets``."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        for listener in sockets or ():
            acceptor = Acceptor(listener, self._connections, self._make_protocol)
            self._acceptors.append(acceptor)
        self.started = True

    def _make_protocol(self) -> HttpProtocol:
        return self._http(self.config, self.server_state, self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)

    async def main_loop(self) -> None:
        """Until a signal or the engine's death. The date header is why it wakes each second."""
        died = asyncio.ensure_future(self._models.died.wait())
        stopped = asyncio.ensure_future(self._stop.wait())
        watched = {died, stopped}
        while not died.done() and not stopped.done():
            await self.on_tick(0)
            await asyncio.wait(watched, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        for task in watched:
            task.cancel()
        if self._models.died.is_set():
            self.exit_code = 1
            logger.error("an engine stopped unexpectedly; the process exits")
        elif not await drain(self._models, self._sockets, self._drain_timeout_s, self._hurry):
            self.exit_code = 1


async def drain(models: Models, sockets: Sockets, timeout_s: float, hurry: asyncio.Event) -> bool:
    """Ends all requests; False if the engine did not.

    Sessions that a store keeps are saved at the boundary of a token, and their
    readers get `migrate`. Other requests continue for up to ``timeout_s`` and are cancelled
    then, or as soon as the shutdown is hurried. Sockets get 1012 after their last event.
    """
    drain_logger.info("draining for up to %g s", timeout_s)
    models.begin_drain()
    deadline_s = time.monotonic() + timeout_s
    ended = True
    await _ends(models.retire(), deadline_s, hurry, HURRIED_SAVE_S)
    if not await _ends(models.drained(), deadline_s, hurry):
        models.cancel_all()
        ended = await _ends(models.drained(), time.monotonic() + CANCEL_TIMEOUT_S)
        if not ended:
            drain_logger.error("the engine did not end its requests")
    await sockets.close(CLOSE_TIMEOUT_S)
    return ended


async def _ends(
    work: Coroutine[Any, Any, None],
    deadline_s: float,
    hurry: asyncio.Event | None = None,
    hurried_s: float = 0.0,
) -> bool:
    """Whether ``work`` ends in time; that is ``hurried_s`` at most once the shutdown is hurried."""
    working = asyncio.ensure_future(work)
    hurrying = asyncio.ensure_future((hurry or asyncio.Event()).wait())
    try:
        async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
            await asyncio.wait({working, hurrying}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({working}, timeout=hurried_s)
    except TimeoutError:
        pass
    ended = working.done()
    working.cancel()
    hurrying.cancel()
    return ended
