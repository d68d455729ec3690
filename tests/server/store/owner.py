"""A process that owns a store: ``python -m tests.server.store.owner PATH``.

For each line that it reads it commits a token of session ``s1``, and writes "ok"
or the code of the error.
"""

from __future__ import annotations

import sys
from pathlib import Path

from server.store.errors import StoreError
from server.store.sqlite_store import open_store
from tests.server.store.records import IDENTITY, Writer


def main() -> None:
    store = open_store(Path(sys.argv[1]), IDENTITY)
    writer = Writer()
    store.commit([writer.opened(), writer.accepted()])
    print("open", flush=True)
    for _ in sys.stdin:
        try:
            store.commit([writer.token()])
            print("ok", flush=True)
        except StoreError as error:
            print(error.code, flush=True)
    store.close()


if __name__ == "__main__":
    main()
