"""A server whose model costs nothing: the real process and engine around a stand-in for the runner.

It generates one text without an end. It is paced by sleeping, which costs no CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from benchmarks.process import LOCAL
from model.bundled_models import DEFAULT_MODEL
from model.config import ModelConfig
from model.state import StateLayout
from model.tokenizer import Tokenizer
from server.api.app import create_app
from server.config import ServerConfig
from server.engine.engine import Engine, EngineConfig
from server.engine.runner import NOTHING, CpuStatePool, Draw, Feed, RowOutput, TokenScore
from server.engine.types import SamplingParams
from server.http.server import bind, serve
from server.models.registry import Models
from server.models.service import make_service
from server.observability.metrics import Metrics
from server.runtime.async_engine import AsyncEngine
from server.sessions.sessions import Signing
from server.store.base import Identity
from server.store.sqlite.store import MemoryStore
from tests.fakes import MODEL

MAX_SESSIONS = 256
#: Unpaced, the client may fall behind; that is not what is measured.
MAX_QUEUED_EVENTS = 1 << 20
TEXT = (
    "Once upon a time there was a little fox who lived under an old oak. She asked the owl where "
    'the river goes. "It goes on," said the owl, and so did she, all day long, to the café.\n'
)


class Fountain:
    """A `server.engine.runner.Runner` that writes ``ids`` endlessly, at most so many per second."""

    grid = ()

    def __init__(self, ids: Sequence[int], steps_per_s: float) -> None:
        self._ids = tuple(ids)
        self._period_s = 1 / steps_per_s if steps_per_s else 0.0
        self._due_s = 0.0

    def prepare(self, params: SamplingParams) -> Draw:
        return True

    def run(self, feeds: Sequence[Feed]) -> list[RowOutput]:
        self._wait()
        ids, num_ids = self._ids, len(self._ids)
        rows = (ids[feed.position % num_ids] if feed.draw else None for feed in feeds)
        return [NOTHING if token is None else ((token,), (), ()) for token in rows]

    # The benchmark uses none of these.

    def score(self, feed: Feed, following: int, num_top: int = 0) -> list[TokenScore]:
        raise NotImplementedError

    def embed(self, feed: Feed) -> npt.NDArray[np.float64]:
        raise NotImplementedError

    def _wait(self) -> None:
        """Until the next step is due; late ones are not made up for."""
        now = time.monotonic()
        if self._due_s > now:
            time.sleep(self._due_s - now)
        self._due_s = max(self._due_s, now) + self._period_s


def main() -> int:
    """Serves on a free port of the loopback, and prints its address."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--steps-per-s", type=float, default=0.0, help="steps per second; 0 is no limit"
    )
    options = parser.parse_args()
    tokenizer = Tokenizer.load(DEFAULT_MODEL / "tokenizer.json")
    model = replace(
        ModelConfig.load(DEFAULT_MODEL / "config.json"), vocab_size=tokenizer.vocab_size
    )
    engine = Engine(
        model,
        tokenizer,
        CpuStatePool(StateLayout.of(model), MAX_SESSIONS),
        Fountain(tokenizer.encode(TEXT), options.steps_per_s),
        EngineConfig(new_id=map(str, range(1 << 30)).__next__),
    )
    config = ServerConfig.load(host=LOCAL, port=0, max_queued_events=MAX_QUEUED_EVENTS)
    async_engine = AsyncEngine(engine, time.monotonic, Metrics(), MemoryStore())
    identity = Identity("", "", "", "", 0, "")
    service = make_service(async_engine, tokenizer, MODEL, config, Signing(identity, b""))
    app = create_app(Models.only(service), config, "0.0.0")
    with bind(LOCAL, 0) as listener:
        print(f"http://{LOCAL}:{listener.getsockname()[1]}", flush=True)
        return serve(app, config, listener)


if __name__ == "__main__":
    sys.exit(main())
