"""The PostgreSQL that replicas share while they are measured, and what it does for them.

One of its own, from Debian's package, that syncs each commit to the disk. Reads Linux's `/proc`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import psycopg

from benchmarks.machine import cpu_seconds, thread_seconds
from server.store.postgres.database import SCHEMA
from tests.postgres import Postgres

#: Of the replicas, as `server.store.postgres.database` names them.
APPLICATION = "everstream"


class Work(NamedTuple):
    """Running totals of the database.

    CPU of all its processes, bytes of WAL, transactions, and of these the commits of journals.
    """

    cpu_s: float
    wal_bytes: int
    transactions: int
    commits: int

    def since(self, before: Work) -> Work:
        """What was done after ``before``."""
        return Work(
            self.cpu_s - before.cpu_s,
            self.wal_bytes - before.wal_bytes,
            self.transactions - before.transactions,
            self.commits - before.commits,
        )


class Place:
    """An empty database at ``url``. Its methods ask over a connection of their own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._connection = psycopg.connect(url, autocommit=True, application_name="benchmark")
        file = str(self.ask("SELECT pg_read_file('postmaster.pid')"))
        self._pid = int(file.split()[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def ask(self, query: str, *parameters: object) -> Any:
        """The first column of the first row."""
        row = self._connection.execute(query.encode(), parameters).fetchone()
        return row and row[0]

    @property
    def schema(self) -> str | None:
        """That of the model that is served, once a replica has made it."""
        name = self.ask("SELECT nspname FROM pg_namespace WHERE starts_with(nspname, %s)", SCHEMA)
        return None if name is None else str(name)

    def work(self) -> Work:
        """The totals now. Of the transactions those of the last second may be missing."""
        schema = self.schema
        tops = f'SELECT max(id) AS top FROM "{schema}".journal GROUP BY replica'
        count = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        return Work(
            self._cpu_s(),
            int(self.ask("SELECT pg_current_wal_insert_lsn() - '0/0'")),
            int(self.ask(count)),
            int(self.ask(f"SELECT coalesce(sum(top), 0) FROM ({tops}) AS last") if schema else 0),
        )

    @property
    def num_connections(self) -> int:
        """Those of all replicas."""
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        return int(self.ask(query, APPLICATION))

    def _cpu_s(self) -> float:
        """Of the server, its children that have ended, and those that run."""
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        total = cpu_seconds(self._pid) + _ended_seconds(self._pid)
        for child in map(int, children):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                total += sum(thread_seconds(child).values())
        return total


@contextmanager
def place() -> Iterator[Place]:
    """A new PostgreSQL, while the ``with`` block runs."""
    server = Postgres(fsync=True)
    try:
        server.start()
        with Place(server.new_database()) as found:
            yield found
    finally:
        server.close()


def _ended_seconds(pid: int) -> float:
    """User and system time of the children that a process has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
