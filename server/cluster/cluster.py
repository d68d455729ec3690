"""The parts that replicas share, in place of an embedded store: see `server.models.storage`."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from functools import partial

from server.cluster.ownership import PostgresOwnership
from server.config.environment import object_storage_environment
from server.config.settings import ServerConfig
from server.runtime.async_engine import AsyncEngine
from server.sessions.prefix_tier import PrefixTier
from server.store.base import Identity, Store
from server.store.errors import StoreError
from server.store.object_storage.objects import Connection, Objects, TableObjects
from server.store.postgres.connecting import TIMEOUT_S, connect
from server.store.postgres.link import SharedPlace
from server.store.postgres.migrations import owner_elsewhere, schema_of
from server.store.postgres.shared_prefixes import SharedLimits, SharedPrefixes
from server.store.postgres.store import PostgresStore
from server.store.saving import StoreLimits

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

    def ownership(self, async_engine: AsyncEngine, store: Store) -> PostgresOwnership:
        """Which of the replicas that serve from ``store`` has a session."""
        assert isinstance(store, PostgresStore), store
        return PostgresOwnership(async_engine, store)

    def open_prefixes(
        self, name: str, identity: Identity, async_engine: AsyncEngine, bos_token_id: int
    ) -> PrefixTier:
        """The beginnings of prompts that all replicas share."""
        shared = SharedPrefixes(
            lambda: connect(self._url, prepare=self._config.store_direct is None),
            schema_of(name, identity.model),
            self._objects(PREFIX_TIMEOUT_S),
            identity,
            SharedLimits(self._config.prefix_disk),
            time.monotonic,
        )
        return PrefixTier(
            async_engine, shared, bos_token_id, shared=True, timeout_s=FETCH_S, at_end=shared.close
        )

    def owner_elsewhere(self, name: str, digest: str) -> Callable[[str], str | None]:
        """A function that says whose a session of another version is. It blocks."""
        return partial(owner_elsewhere, self._url, schema_of(name, digest))

    def _objects(self, timeout_s: float) -> Callable[[Connection], Objects]:
        url = self._config.store_objects
        if url is None:
            return TableObjects
        try:
            from server.store.object_storage.s3 import S3Objects
        except ImportError as error:
            raise StoreError(
                "EVERSTREAM_STORE_OBJECTS needs obstore: pip install 'everstream[s3]'"
            ) from error
        try:
            objects = S3Objects(url, object_storage_environment(), timeout_s)
        except (ValueError, OSError) as error:
            raise StoreError(f"EVERSTREAM_STORE_OBJECTS: {error}") from error
        return lambda connection: objects
