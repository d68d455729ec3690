"""A reader of one kept stream that continues at another replica when its own is gone."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from dataclasses import dataclass

import orjson

from benchmarks.cluster.load import MAX_TOKENS, PROMPT_IDS
from benchmarks.wire import Frame, Wire, connect
from clients.python.backoff import Backoff
from clients.python.errors import ConnectionLost

PROMPT_TOKENS = 16
PATIENCE_S = 120.0


@dataclass
class Times:
    """Of one reader, in seconds of `time.perf_counter`."""

    last_s: float = 0.0
    lost_s: float = 0.0
    resumed_s: float = 0.0
    event_s: float = 0.0
    fresh_s: float = 0.0
    num_tries: int = 0


class Reader:
    """One stream, wherever its session is. ``age`` tokens make it old enough for the strike."""

    def __init__(self, number: int, seed: int, age: int) -> None:
        draw = random.Random(f"{seed}-{number}")
        self.times = Times()
        self.is_old = asyncio.Event()
        self.is_over = asyncio.Event()
        self._backoff = Backoff(random=draw.random, clock=time.monotonic)
        self._age, self._seq = age, 0
        self._session = self._epoch = ""
        self._log_end: int | None = None
        self._wire: Wire | None = None
        self._generate: Frame = {
            "type": "generate",
            "request_id": "r",
            "prompt": draw.choices(PROMPT_IDS, k=PROMPT_TOKENS),
            "keep": True,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": seed,
        }

    async def run(self, port: int, other: int, take_over: bool) -> None:
        """Reads at ``port`` for as long as it can, and at ``other`` from then on."""
        try:
            await self._read(port, self._generate)
            self.times.lost_s = time.perf_counter()
            attempts = self._backoff.attempts(PATIENCE_S)
            self._log_end = -1
            while True:
                self.times.num_tries += 1
                with suppress(OSError):
                    await self._read(other, self._resume(take_over))
                await attempts.wait(ConnectionLost("the replica does not answer"))
        finally:
            self.leave()

    def leave(self) -> None:
        """Ends the present connection without a word."""
        if self._wire is not None:
            self._wire.abort()

    def _resume(self, take_over: bool) -> Frame:
        place = {"session": self._session, "epoch": self._epoch, "last_seq": self._seq}
        return {"type": "resume", "request_id": "r", "take_over": take_over, **place}

    async def _read(self, port: int, message: Frame) -> None:
        """One connection, to its end."""
        self._wire = wire = Wire(message, lambda payload: self._take(orjson.loads(payload)))
        await connect(wire, port)
        await wire.ended

    def _take(self, frame: Frame) -> None:
        now, kind = time.perf_counter(), frame["type"]
        if kind == "token":
            assert frame["seq"] == self._seq + 1, (frame, self._seq)
            self._seq += 1
            self._note(now)
        elif kind == "started":
            self._session, self._epoch = frame["session"], frame["epoch"]
        elif kind == "resumed":
            assert frame["busy"], frame
            self._log_end = frame["last_seq"]
            self.times.resumed_s = now
        elif kind in ("migrate", "error"):
            self.leave()
        else:
            raise AssertionError(frame)

    def _note(self, now: float) -> None:
        if self._log_end is None:
            self.times.last_s = now
            if self._seq >= self._age:
                self.is_old.set()
            return
        self.times.event_s = self.times.event_s or now
        if self._seq > self._log_end and not self.is_over.is_set():
            self.times.fresh_s = now
            self.is_over.set()
