"""A process that owns a store: ``python -m tests.server.store.owner PATH``.

For each line that it reads it commits a token of session ``s1``, and writes "ok"
or the code of the error. For the line "begin" it writes "begun" in the middle of the
commit, and ends it when it reads another line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from server.store.base import StoreError
from server.store.log import LoggedEntry
from server.store.sqlite.store import SqliteStore, open_store
from tests.server.store.records import IDENTITY, Writer


def begin(store: SqliteStore) -> None:
    """The next commit stands still until there is a line to read."""
    assert store._connection is not None
    log = store._connection.log
    add_row = log._insert_row

    def add_row_slowly(data: bytes, keys: str, steps: Sequence[LoggedEntry]) -> None:
        database, log._insert_row = log._database, add_row  # type: ignore[method-assign]
        with database.transaction():
            print("begun", flush=True)
            sys.stdin.readline()
        add_row(data, keys, steps)

    log._insert_row = add_row_slowly  # type: ignore[method-assign]


def main() -> None:
    store = open_store(Path(sys.argv[1]), IDENTITY)
    writer = Writer()
    store.commit([writer.opened(), writer.accepted()])
    print("open", flush=True)
    for line in sys.stdin:
        try:
            if line == "begin\n":
                begin(store)
            store.commit([writer.token()])
            print("ok", flush=True)
        except StoreError as error:
            print(error.code, flush=True)
    store.close()


if __name__ == "__main__":
    main()
