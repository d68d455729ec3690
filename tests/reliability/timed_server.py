"""A server that measures its event loop: ``python -m tests.reliability.timed_server FILE``.

It is the real one over the fake engine, with formats and a store in memory. For each turn of the
loop that takes long it writes a line to ``FILE``: see `Turn`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import selectors
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from server.api.app import create_app
from server.config import ServerConfig
from server.constraints.compiler import FormatCompiler
from server.http.server import bind, serve
from server.observability.metrics import Metrics
from server.runtime.async_engine import AsyncEngine
from server.store.sqlite.store import MemoryStore
from tests.fakes import ByteTokenizer, FakeEngine
from tests.server.one_model import only

#: Turns that take less are not worth a line.
SHORT_S = 0.01
#: The loop turns at least so often.
TICK_S = 0.02


class CoarseTokenizer(ByteTokenizer):
    """Each 64th byte of a text is a token, so that what the engine does with it takes no time."""

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        return super().encode(text, allow_special=True) if allow_special else [*text.encode()[::64]]


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of processor time, which do not depend on what else the machine does.

    ``loop_s``: of the event loop's thread, in what it ran in one turn. ``process_s``: of all
    threads, from one turn to the next; a thread that keeps the interpreter's lock adds to it.
    """

    loop_s: float
    process_s: float

    @classmethod
    def read(cls, line: str) -> Turn:
        """What `line` has written."""
        return cls(*map(float, line.split()))

    def line(self) -> str:
        return f"{self.loop_s:.4f} {self.process_s:.4f}\n"


class TimedSelector(selectors.DefaultSelector):
    """The event loop calls `select` once in each turn."""

    def __init__(self, written: TextIO) -> None:
        super().__init__()
        self._written = written
        self._loop_s, self._process_s = time.thread_time(), time.process_time()

    def select(self, timeout: float | None = None) -> list[Any]:
        loop_s = time.thread_time() - self._loop_s
        found = super().select(TICK_S if timeout is None else min(timeout, TICK_S))
        process_s = time.process_time()
        turn = Turn(loop_s, process_s - self._process_s)
        if max(turn.loop_s, turn.process_s - 2 * TICK_S) > SHORT_S:
            self._written.write(turn.line())
        self._loop_s, self._process_s = time.thread_time(), process_s
        return found


class TimedPolicy(asyncio.DefaultEventLoopPolicy):
    """Event loops with a `TimedSelector`."""

    def __init__(self, written: TextIO) -> None:
        super().__init__()
        self._written = written

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(TimedSelector(self._written))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    config = ServerConfig.load(port=options.port)
    compiler = FormatCompiler(ByteTokenizer())
    # Kept responses and continuations that are scored together have a session each.
    engine = FakeEngine(max_sessions=1024, max_waiting=1024, matchers=compiler.matcher)
    listener = bind(config.host, config.port)
    async_engine = AsyncEngine(engine, time.monotonic, Metrics(), MemoryStore())
    models = only(async_engine, config, constraints=compiler, tokenizer=CoarseTokenizer())
    app = create_app(models, config, "0.0.0")
    gc.freeze()  # as `everstream serve` does
    with options.file.open("a", buffering=1) as written:
        asyncio.set_event_loop_policy(TimedPolicy(written))
        print(f"port {listener.getsockname()[1]}", flush=True)
        return serve(app, config, listener)


if __name__ == "__main__":
    sys.exit(main())
