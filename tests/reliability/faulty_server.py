"""A server that comes to grief on demand: ``python -m tests.reliability.faulty_server FAULT``.

On SIGUSR1 it meets its fault, in the next step of the engine or the next commit of
the store. Otherwise it is the real one, over the fake engine and a real store.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from server.api.app import create_app
from server.config import ServerConfig
from server.engine.session import Record
from server.http.server import bind, serve
from server.observability.metrics import Metrics
from server.runtime.async_engine import AsyncEngine
from server.store.base import Store
from server.store.sqlite.store import open_store
from tests.fakes import FakeEngine
from tests.server.one_model import SIGNING, only

STEP_S = 0.005


class Panic(BaseException):
    """What an extension module raises when it has lost its footing: no `Exception`."""


def hang() -> NoReturn:
    while True:
        time.sleep(3600)


def die() -> NoReturn:
    raise RuntimeError("asked to")


def panic() -> NoReturn:
    raise Panic


FAULTS = {
    f"{part}-{name}": (part, fault)
    for part in ("engine", "store")
    for name, fault in (("hangs", hang), ("dies", die), ("panics", panic))
}


class FaultyStore:
    """A store whose next commit meets ``fault`` once ``is_due`` is set."""

    def __init__(self, store: Store, meet: Any) -> None:
        self._store, self._meet = store, meet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def commit(self, records: Sequence[Record]) -> None:
        self._meet("store")
        self._store.commit(records)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--port", type=int)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--drain-timeout", type=float)
    options = parser.parse_args()
    config = ServerConfig.load(port=options.port, drain_timeout_s=options.drain_timeout)
    logging.basicConfig(level=logging.INFO)
    is_due = threading.Event()
    signal.signal(signal.SIGUSR1, lambda number, frame: is_due.set())
    place, fault = FAULTS[options.fault]

    def meet(part: str) -> None:
        if part == place and is_due.is_set():
            fault()

    def step() -> None:
        time.sleep(STEP_S)
        meet("engine")

    store = cast(Store, FaultyStore(open_store(options.store, SIGNING.identity), meet))
    engine = FakeEngine(before_step=step, can_evict=True)
    listener = bind(config.host, config.port)
    print(f"port {listener.getsockname()[1]}", flush=True)
    async_engine = AsyncEngine(engine, time.monotonic, Metrics(), store)
    app = create_app(only(async_engine, config), config, "0.0.0")
    return serve(app, config, listener)


if __name__ == "__main__":
    sys.exit(main())
