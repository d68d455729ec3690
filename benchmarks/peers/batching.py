"""What is common to engines that batch requests by themselves: a step makes a token for each.

Where streams have a past it is one random text, which an engine's prefix cache shares between them:
in its favour, as real sessions have pasts of their own.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.checkpoints import chat, hybrids, shapes
from benchmarks.decode.models import step_cost
from benchmarks.decode.peers import (
    MAX_FILL_S,
    PREFILL_TOKENS,
    Measured,
    Opened,
    Point,
    Unavailable,
)
from benchmarks.decode.roofline import ITEM_BYTES, Cost
from model.architectures.config import Config
from model.weights import num_parameters

#: Tokens that a stream may grow by before its request is sent again.
ROOM = 128
KV_CACHE_GB = 6
WARM_UP_STEPS = 2
#: Of a stream without a past: a prompt of one token fails in some engines.
FIRST_TOKENS = 2


@dataclass(frozen=True)
class Subject:
    """A model of the benchmark: its config, its GGUF file, and what a step of it costs."""

    config: Callable[[str], Config]
    file: Callable[[Path, str, str], Path]
    cost: Callable[[Path, Point], Cost]


def _chat_cost(file: Path, point: Point) -> Cost:
    numbers = num_parameters(chat.ORIGINAL)
    is_file = point.dtype == "int4"
    return chat.original_cost(file.stat().st_size if is_file else 2 * numbers, point)


def _hybrid_cost(file: Path, point: Point) -> Cost:
    return hybrids.step_cost(point, 2 * hybrids.position_numbers(hybrids.CONFIGS[point.size]))


def _rwkv7_cost(file: Path, point: Point) -> Cost:
    rows = PREFILL_TOKENS if point.mode == "prefill" else point.streams
    config = shapes.CONFIGS[point.size]
    return step_cost(config, ITEM_BYTES[point.dtype], rows, point.streams)


CHAT = Subject(lambda size: chat.ORIGINAL, chat.file_of, _chat_cost)
HYBRID = Subject(lambda size: hybrids.CONFIGS[size], hybrids.file_of, _hybrid_cost)
RWKV7 = Subject(lambda size: shapes.CONFIGS[size], shapes.file_of, _rwkv7_cost)
SUBJECTS = {"chat": CHAT, "hybrid": HYBRID, "rwkv7": RWKV7}


class Batching(ABC):
    """A `decode.peers.Contender`: an engine with requests for one `Subject`."""

    max_fill_s = MAX_FILL_S

    def __init__(self, models: Path, subject: Subject) -> None:
        self.folder, self.subject = models, subject
        self._loaded: tuple[str, str] | None = None
        self._too_long = sys.maxsize  # the shortest past that takes too long
        self._ids = count()
        self._draw = np.random.default_rng(0)

    def open(self, point: Point) -> Opened:
        if self._loaded != (point.size, point.dtype):
            self._loaded = None
            self.load(point)
            self._loaded = point.size, point.dtype
        self.cancel()
        config = self.subject.config(point.size)
        self._point, self._vocabulary = point, config.vocab_size
        self._past = self._random(max(point.context, FIRST_TOKENS))
        if point.mode == "prefill":
            self._prefill()
        else:
            self._begin()
        step_tokens = PREFILL_TOKENS if point.mode == "prefill" else point.streams
        cost = self.subject.cost(self.file(point), point)
        return Opened(self.variant(), num_parameters(config), step_tokens, cost)

    def file(self, point: Point) -> Path:
        """The GGUF file of the model at ``point``."""
        return self.subject.file(self.folder, point.size, point.dtype)

    def run(self, seconds: float) -> Measured:
        """Steps until ``seconds`` of them are over; sending requests again is not counted."""
        tokens, elapsed = 0, 0.0
        while tokens == 0 or elapsed < seconds:
            if self._point.mode == "decode" and self._made >= ROOM:
                self.cancel()
                self._begin()
            start = time.perf_counter()
            tokens += self._prefill() if self._point.mode == "prefill" else self._decode()
            elapsed += time.perf_counter() - start
        return Measured(tokens, elapsed)

    @abstractmethod
    def load(self, point: Point) -> None:
        """The engine, ready for requests. Raises `Unavailable`."""

    @abstractmethod
    def submit(self, name: int, ids: list[int], max_tokens: int) -> None:
        """A request, greedy, without an end token."""

    @abstractmethod
    def step(self) -> int:
        """One step of the engine; the number of tokens that it made."""

    @abstractmethod
    def cancel(self) -> None:
        """Ends all requests."""

    @abstractmethod
    def variant(self) -> str:
        """How it runs, in a few words."""

    def _begin(self) -> None:
        """All requests, until each has its first tokens. Raises `Unavailable` if it takes long."""
        if self._point.context >= self._too_long or not self._read_past():
            self._too_long = self._point.context
            raise Unavailable(
                f"to prefill {self._point.context:,} takes over {self.max_fill_s:g} s"
            )
        for _ in range(self._point.streams - 1):
            self._request(self._past)
        warm = 0
        while warm < WARM_UP_STEPS:
            warm += self.step() == self._point.streams
        self._made = WARM_UP_STEPS

    def _read_past(self) -> bool:
        """The first request, until its first token; whether that took no longer than it may."""
        self._request(self._past)
        start = time.perf_counter()
        while not self.step():
            if time.perf_counter() - start > self.max_fill_s:
                return False
        return True

    def _request(self, ids: list[int]) -> None:
        self.submit(next(self._ids), ids, 2 * ROOM + self._point.streams)

    def _decode(self) -> int:
        made = self.step()
        assert made == self._point.streams, made
        self._made += 1
        return made

    def _prefill(self) -> int:
        self.submit(next(self._ids), self._random(PREFILL_TOKENS), 1)
        while not self.step():
            pass
        return PREFILL_TOKENS

    def _random(self, number: int) -> list[int]:
        """Ids that no request had before, so that no prefix is found."""
        return [int(token) for token in self._draw.integers(100, self._vocabulary, number)]
