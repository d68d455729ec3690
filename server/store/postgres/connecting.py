"""A connection to PostgreSQL that ends in time, whatever becomes of the database."""

from __future__ import annotations

import select
import time
from collections.abc import Generator
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.waiting import Ready, Wait

from server.store.errors import StoreFailed

#: Nothing that a store asks takes so long, unless the database hangs.
TIMEOUT_S = 2.5
#: A process that is stopped while it waits, or that gets no processor, loses so much of it.
SLICE_S = 0.25
CONNECT_TIMEOUT_S = 2


class Hung(psycopg.OperationalError):
    """No answer came in time."""


class _Timed(psycopg.Connection[tuple[Any, ...]]):
    """A connection that waits for `TIMEOUT_S` at most, whatever the database does.

    For a statement, or for all that a pipeline has sent.
    """

    def wait(
        self, gen: Generator[Any, Any, Any], interval: float = 0.0, timeout: float | None = None
    ) -> Any:
        """Runs ``gen`` to its end. Raises `psycopg.OperationalError` after the time.

        Only time within waits counts, of each wait a slice at most: the database may have
        answered, or have been asked nothing yet, while this process was stopped.
        """
        left_s = TIMEOUT_S if timeout is None else timeout
        poll, fd = select.poll(), self.pgconn.socket
        try:
            wanted = next(gen)
            while True:
                reads = select.POLLIN if wanted & Wait.R else 0
                poll.register(fd, reads | (select.POLLOUT if wanted & Wait.W else 0))
                found: list[tuple[int, int]] = []
                while not found:
                    began_s = time.monotonic()
                    found = poll.poll(max(0.0, min(left_s, SLICE_S)) * 1000)
                    left_s -= min(time.monotonic() - began_s, SLICE_S)
                    if not found and left_s <= 0:
                        self.pgconn.finish()  # whatever it still answers is of no use
                        raise Hung("the database does not answer")
                events = found[0][1]  # an error is for the next read to find
                ready = Ready.R if events & ~select.POLLOUT else Ready.NONE
                wanted = gen.send(Ready(ready | (Ready.W if events & select.POLLOUT else 0)))
        except StopIteration as end:
            return end.value


def connect(url: str, *, prepare: bool = True, timed: bool = True) -> psycopg.Connection[Any]:
    """A connection that is noticed to be dead. Raises errors of psycopg's."""
    kind = _Timed if timed else psycopg.Connection
    try:
        conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        raise StoreFailed("the URL of the shared store cannot be read") from None
    return kind.connect(
        url,
        autocommit=True,
        prepare_threshold=2 if prepare else None,
        connect_timeout=CONNECT_TIMEOUT_S,
        keepalives_idle=5,
        keepalives_interval=2,
        keepalives_count=3,
        tcp_user_timeout=10_000,
        application_name="everstream",
    )
