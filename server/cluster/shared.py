"""The parts that replicas share, in place of an embedded store: see `server.models.storage`."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import Any, TypeVar

import orjson

from server.config import ServerConfig, object_storage_environment
from server.engine.types import SessionInfo
from server.errors import RequestError
from server.runtime.async_engine import AsyncEngine
from server.runtime.commands import Absent
from server.sessions.loader import AttachedElsewhere, Handover, Held
from server.sessions.origins import PrefixTier
from server.store.base import HeldElsewhere, Identity, Store, StoreError
from server.store.postgres.database import TIMEOUT_S, connect, owner_elsewhere, schema_of
from server.store.postgres.link import SharedPlace
from server.store.postgres.objects import (
    Connection,
    Objects,
    SharedLimits,
    SharedPrefixes,
    TableObjects,
)
from server.store.postgres.store import PostgresStore
from server.store.table_store import StoreLimits

# -------------------------------------------------------------------------------------------------
# Holding over PostgreSQL: a replica asks the holder of a session for it by a notice.
#
# Replicas need no addresses of each other. A holder that does not answer in time
# has failed, or is reclaimed meanwhile; the client gets an error that says to retry.


holding_logger = logging.getLogger("everstream.holding")

#: A live replica answers within a few steps of its engine and a commit.
ANSWER_S = 3.0

P = TypeVar("P")
R = TypeVar("R")


class PostgresHolding:
    """See `server.sessions.loader.Holding`. Other replicas have ``answer_s`` seconds to answer."""

    def __init__(
        self, async_engine: AsyncEngine, store: PostgresStore, answer_s: float = ANSWER_S
    ) -> None:
        self._answer_s = answer_s
        self._continues = False
        self._async_engine, self._store = async_engine, store
        self._held: Held | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ids = count(1)
        self._asked: dict[int, tuple[int, asyncio.Future[dict[str, Any]]]] = {}
        self._reclaiming: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, held: Held, continues: bool) -> None:
        self._held, self._loop = held, asyncio.get_running_loop()
        self._continues = continues
        run = self._run
        self._store.listen(run(self._understand), run(self._begin_reclaim), run(self._begin_after))

    async def acquire(self, session: str, owner: str, replica: int, handover: Handover) -> None:
        id, future = next(self._ids), asyncio.get_running_loop().create_future()
        self._asked[id] = replica, future
        question = {"ask": id, "by": self._store.key, "session": session, "owner": owner}
        try:
            await self._tell(replica, question | {"how": handover})
            async with asyncio.timeout(self._answer_s):
                answer = await future
        except TimeoutError:
            raise HeldElsewhere(replica) from None
        finally:
            del self._asked[id]
        if (info := answer.get("attached")) is not None:
            raise AttachedElsewhere(SessionInfo(**info))
        if answer.get("failed"):
            raise HeldElsewhere(replica)

    async def release(self, session: str) -> None:
        try:
            await self._ask(lambda store: store.release(session))
        except RequestError as error:
            holding_logger.warning("session %s was not released: %s", session, error.message)

    async def claim_key(self, owner: str, key: str) -> bool:
        return await self._ask(lambda store: store.claim_key(owner, key))

    async def release_key(self, owner: str, key: str) -> None:
        try:
            await self._ask(lambda store: store.give_back_key(owner, key), always=True)
        except RequestError as error:
            holding_logger.warning("a key could not be released yet: %s", error.message)

    def _run(self, call: Callable[[P], None]) -> Callable[[P], None]:
        """``call`` from another thread: it runs in the event loop."""

        def run(parameter: P) -> None:
            assert self._loop is not None
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(call, parameter)

        return run

    # The event loop

    def _understand(self, text: str) -> None:
        message = orjson.loads(text)
        if "ask" in message:
            self._begin(self._answer(message))
        elif (asked := self._asked.get(message["answer"])) and not asked[1].done():
            asked[1].set_result(message)

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, question: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"answer": question["ask"]}
        session, handover = question["session"], question["how"]
        try:
            stays = await self._give(session, question["owner"], handover)
            if stays is not None:
                answer["attached"] = asdict(stays)
        except RequestError as error:
            holding_logger.warning("a session was not handed over: %s", error.message)
            answer["failed"] = error.code
        try:
            await self._tell(question["by"], answer)
        except RequestError as error:
            holding_logger.warning("an answer could not be sent: %s", error.message)

    async def _give(self, session: str, owner: str, handover: Handover) -> SessionInfo | None:
        """None when another replica may load the session; else it stays with its reader."""
        assert self._held is not None
        found = await self._held.give(session, owner, handover)
        if not isinstance(found, Absent):
            return found
        # A load that begins from here on asks the store after this release.
        await self._ask(lambda store: store.release(session))
        return None

    def _begin_reclaim(self, key: int) -> None:
        if key not in self._reclaiming:
            self._reclaiming.add(key)
            self._begin(self._reclaim_replica(key))

    async def _reclaim_replica(self, key: int) -> None:
        try:
            if not await self._ask(lambda store: store.reclaim(key)):
                return  # it is tried again, or another replica has done it
            await self._after(key)
        except RequestError as error:
            holding_logger.warning("replica %d could not be reclaimed: %s", key, error.message)
        finally:
            self._reclaiming.discard(key)

    def _begin_after(self, key: int) -> None:
        self._begin(self._after(key))

    async def _after(self, key: int) -> None:
        """What replica ``key`` had has no owner any more."""
        for replica, future in self._asked.values():
            if replica == key and not future.done():
                future.set_result({})
        if self._continues and self._held is not None:
            try:
                await self._held.continue_unfinished()
            except RequestError as error:
                holding_logger.warning(
                    "sessions of replica %d could not be continued: %s", key, error.message
                )

    async def _tell(self, key: int, message: dict[str, Any]) -> None:
        text = orjson.dumps(message).decode()
        await self._ask(lambda store: store.tell(key, text))

    async def _ask(self, ask: Callable[[PostgresStore], R], *, always: bool = False) -> R:
        """On the store thread, in turn with what the engine records."""

        def ask_shared(store: Store) -> R:
            assert isinstance(store, PostgresStore), store
            return ask(store)

        return await self._async_engine.ask_store(ask_shared, always=always)


logger = logging.getLogger("everstream.cluster")

#: How long a prompt waits for its beginning, and what hangs is given up.
FETCH_S, PREFIX_TIMEOUT_S = 0.25, 2.0


class Cluster:
    """Opens stores in the database that ``config.store`` names, one for each version of a model."""

    def __init__(self, config: ServerConfig) -> None:
        assert config.store is not None
        self._config, self._url = config, config.store

    def open_store(self, name: str, identity: Identity, limits: StoreLimits) -> PostgresStore:
        """The store of the model called ``name``. Raises `StoreError`."""
        config = self._config
        place = SharedPlace(
            url=self._url,
            schema=schema_of(name, identity.model),
            identity=identity,
            objects=self._objects(TIMEOUT_S),
            durability=config.durability,
            direct_url=config.store_direct,
            address=f"{socket.gethostname()}:{config.port}",
            lease_s=config.store_lease_s,
        )
        return PostgresStore(place, limits)

    def signing_key(self, store: Store) -> bytes:
        """What vouches for exported sessions, the same for all replicas."""
        assert isinstance(store, PostgresStore), store
        return store.signing_key()

    def holding(self, async_engine: AsyncEngine, store: Store) -> PostgresHolding:
        """Which of the replicas that serve from ``store`` has a session."""
        assert isinstance(store, PostgresStore), store
        return PostgresHolding(async_engine, store)

    def open_prefixes(
        self, name: str, identity: Identity, async_engine: AsyncEngine, bos_token_id: int
    ) -> PrefixTier:
        """The beginnings of prompts that all replicas share."""
        shared = SharedPrefixes(
            lambda: connect(self._url, prepare=self._config.store_direct is None),
            schema_of(name, identity.model),
            self._objects(PREFIX_TIMEOUT_S),
            identity,
            SharedLimits(self._config.prefix_disk or 0),
            time.monotonic,
        )
        return PrefixTier(
            async_engine, shared, bos_token_id, timeout_s=FETCH_S, at_end=shared.close
        )

    def owner_elsewhere(self, name: str, digest: str) -> Callable[[str], str | None]:
        """A function that says whose a session of another version is. It blocks."""
        return partial(owner_elsewhere, self._url, schema_of(name, digest))

    def _objects(self, timeout_s: float) -> Callable[[Connection], Objects]:
        url = self._config.store_objects
        if url is None:
            return TableObjects
        try:
            from server.store.postgres.s3 import S3Objects
        except ImportError as error:
            raise StoreError(
                "EVERSTREAM_STORE_OBJECTS needs obstore: pip install 'everstream[s3]'"
            ) from error
        try:
            objects = S3Objects(url, object_storage_environment(), timeout_s)
        except (ValueError, OSError) as error:
            raise StoreError(f"EVERSTREAM_STORE_OBJECTS: {error}") from error
        return lambda connection: objects
