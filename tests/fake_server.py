"""The real server over the fake engine: ``python -m tests.fake_server --port 8000``.

Further settings come from ``EVERSTREAM_*`` as for the real one. It prints the
port that it got, so that ``--port 0`` can be used.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time

from server.api.app import create_app
from server.config import ServerConfig
from server.http.server import bind, serve, with_fitting_connections
from server.observability.logs import configure
from server.observability.metrics import Metrics
from server.runtime.async_engine import AsyncEngine
from server.store.sqlite.store import MemoryStore
from tests.fakes import MODEL, FakeEngine
from tests.server.one_model import only


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int)
    parser.add_argument("--step-ms", type=float, default=5.0, help="how long a step pretends")
    parser.add_argument("--max-running", type=int, help="how many run at once")
    parser.add_argument("--user-timeout-ms", type=int, default=20_000)
    options = parser.parse_args()
    config = ServerConfig.load(port=options.port)
    configure(level="INFO")
    config = with_fitting_connections(config)

    max_sessions = config.max_sessions or MODEL.max_sessions
    engine = FakeEngine(
        max_sessions,
        config.max_waiting,
        config.session_ttl_s,
        before_step=lambda: time.sleep(options.step_ms / 1000),
        **({} if options.max_running is None else {"max_running": options.max_running}),
    )
    listener = bind(config.host, config.port, options.user_timeout_ms)
    print(f"port {listener.getsockname()[1]}", flush=True)
    # What the page shows is a model's of the usual size.
    model = dataclasses.replace(MODEL, max_sessions=max_sessions, state_bytes_per_session=448_512)
    async_engine = AsyncEngine(engine, time.monotonic, Metrics(), MemoryStore())
    app = create_app(only(async_engine, config, model), config, "0.0.0")
    return serve(app, config, listener)


if __name__ == "__main__":
    sys.exit(main())
