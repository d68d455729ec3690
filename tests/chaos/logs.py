"""The log of every store that a run had, read by a server without other clients."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection

from tests.chaos.cluster import DATABASE, Cluster
from tests.reliability.history import Epoch, Event, event_of_frame
from tests.reliability.servers import ServerProcess
from tests.reliability.streams import answer, ask, client_of, socket_of
from tests.waiting import eventually

#: Until what a dead replica had is free.
FREE_S = 120.0

Log = dict[tuple[str, Epoch], list[Event]]


async def logs_of(cluster: Cluster, model: Path) -> Log:
    """Kills the replicas, and reads what they and the lost stores have left."""
    lost, present = await lost_and_present(cluster, model)
    return lost | present


async def lost_and_present(cluster: Cluster, model: Path) -> tuple[Log, Log]:
    """Kills the replicas; returns the logs of the lost stores, and of the last one."""
    for replica in cluster.replicas:
        replica.hold()
        replica.mean_to_end()
        num_exits = len(replica.exits)
        if replica.is_up:
            replica.signal(signal.SIGKILL)
            await replica.ended(num_exits)
    lost: Log = {}
    for database in cluster.lost_databases:
        lost |= await _log_of(cluster, database, model)
    return lost, await _log_of(cluster, DATABASE, model)


def _is_used(cluster: Cluster, database: str) -> bool:
    """A store may have been lost before anybody made anything of it."""
    tables = "SELECT count(*) FROM pg_class WHERE relname = 'session'"
    return int(cluster.postgres.psql(tables, database)) > 0


async def _log_of(cluster: Cluster, database: str, model: Path) -> Log:
    if not await asyncio.to_thread(_is_used, cluster, database):
        return {}
    store, environment = cluster.postgres.url(database), cluster.environment
    server = ServerProcess("--model", model, "--store", store, environment=environment)
    try:
        await asyncio.to_thread(server.start)
        log: Log = {}
        for session in await _sessions(server.url):
            epoch, events = await _events(server.stream_url, session)
            log[session, epoch] = events
        return log
    finally:
        server.close()


async def _sessions(url: str) -> list[str]:
    """All of them, page by page."""
    found: list[str] = []
    async with client_of(url) as client:
        while True:
            params: dict[str, Any] = {"limit": 1000}
            if found:
                params["after"] = found[-1]
            page = (await client.get("/v1/sessions", params=params)).json()
            found += [one["session"] for one in page["data"]]
            if not page["has_more"]:
                return found


async def _events(url: str, session: str) -> tuple[str, list[Event]]:
    """What the log had when it was asked; what still ran continues without a reader."""

    async def found() -> tuple[str, list[Event]] | None:
        async with socket_of(url) as socket:
            await ask(socket, type="resume", request_id="l", session=session, last_seq=0)
            resumed = await answer(socket)
            if resumed["type"] == "resumed":
                return resumed["epoch"], await _read(socket, resumed["last_seq"])
        # Its last holder was killed just now.
        assert resumed["error"]["code"] == "session_elsewhere", resumed
        return None

    return await eventually(found, FREE_S)


async def _read(socket: ClientConnection, num_events: int) -> list[Event]:
    events: list[Event] = []
    while len(events) < num_events:
        event = event_of_frame(await answer(socket))
        assert event is not None
        events.append(event)
    return events
