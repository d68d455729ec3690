"""What the command line puts in the place of an embedded store: see `server.storage.Shared`."""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Callable

import psycopg
from psycopg import sql

from server.config import ServerConfig, object_storage_environment
from server.distributed.database import Database, connect, failure
from server.distributed.objects import Objects, TableObjects
from server.distributed.peers import Peers
from server.distributed.postgres_store import PostgresStore, SharedPlace
from server.driver import Driver
from server.store.base import Identity, Store
from server.store.saving import Limits

logger = logging.getLogger("everstream.cluster")

SCHEMA = "everstream_"


class Cluster:
    """Opens stores in the database that ``config.store`` names, one for each version of a model."""

    def __init__(self, config: ServerConfig) -> None:
        assert config.store is not None
        self._config, self._url = config, config.store

    def open_store(self, name: str, identity: Identity, limits: Limits) -> PostgresStore:
        """The store of the model called ``name``. Raises `StoreError`."""
        config = self._config
        place = SharedPlace(
            url=self._url,
            schema=schema_of(name, identity.model),
            identity=identity,
            objects=self._objects(),
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

    def peers(self, driver: Driver, store: Store) -> Peers:
        """The other replicas that serve from ``store``."""
        assert isinstance(store, PostgresStore), store
        return Peers(driver, store)

    def owner_elsewhere(self, name: str, digest: str) -> Callable[[str], str | None]:
        """A function that says whose a session of another version is. It blocks."""
        own = schema_of(name, digest)

        def find(session: str) -> str | None:
            try:
                with connect(self._url) as connection:
                    return _owner(connection, session, own)
            except psycopg.Error as error:
                raise failure(error) from error

        return find

    def _objects(self) -> Callable[[Database], Objects]:
        url = self._config.store_objects
        if url is None:
            return lambda database: TableObjects(database.connection)
        from server.distributed.s3 import S3Objects

        environment = object_storage_environment()
        return lambda database: S3Objects(url, environment)


def schema_of(name: str, digest: str) -> str:
    """The schema of a version of a model; PostgreSQL takes no more than 63 characters."""
    if len(name) > 24:
        name = f"{name[:15]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return f"{SCHEMA}{name}_{digest[:16]}"


def _owner(connection: psycopg.Connection[tuple[str]], session: str, own: str) -> str | None:
    query = "SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s) AND nspname <> %s"
    for (schema,) in connection.execute(query, (SCHEMA, own)).fetchall():
        table = sql.Identifier(schema, "session")
        find = sql.SQL("SELECT owner FROM {} WHERE id = %s").format(table)
        for (owner,) in connection.execute(find, (session,)):
            return owner
    return None
