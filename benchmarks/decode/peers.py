"""Who is measured by `decode`, and the contract that each of them fulfils.

A `Contender` opens a `Point` (loads its model, fills its contexts, warms up) and then decodes for
as long as it is told, again and again, so that several can take turns.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from benchmarks.decode.roofline import Cost

PREFILL_TOKENS = 512
#: A contender gives up where filling its contexts would take longer.
MAX_FILL_S = 60.0


class Unavailable(Exception):
    """A contender cannot do this point; the message says why."""


@dataclass(frozen=True)
class Point:
    """What is measured: ``mode`` "decode" of ``streams`` at ``context`` tokens, or "prefill".

    ``dtype`` is that of the weights: float32, bfloat16, int8 or int4; of files also q4_0 or q4_k_m,
    as llama.cpp makes them.
    """

    size: str
    dtype: str
    streams: int
    context: int
    threads: int
    mode: str = "decode"


@dataclass(frozen=True)
class Opened:
    """What is ready to run: which variant won, and what one step of it must move and compute.

    ``step_tokens`` are the tokens of one step: one for each stream, or those of the prompt.
    """

    variant: str
    num_parameters: int
    step_tokens: int
    cost: Cost


@dataclass(frozen=True)
class Measured:
    """Tokens made in so many seconds."""

    tokens: int
    seconds: float


class Contender(Protocol):
    """Decodes or prefills at one point at a time."""

    def open(self, point: Point) -> Opened:
        """Makes ready, in place of what was open before; raises `Unavailable`."""

    def run(self, seconds: float) -> Measured:
        """Whole steps until ``seconds`` are over, at least one."""


class Steps(ABC):
    """A `Contender` that runs step by step: ``_prefills`` says of which kind."""

    _prefills: bool
    _streams: int

    def run(self, seconds: float) -> Measured:
        """Whole steps until ``seconds`` are over, at least one."""
        step = self._prefill if self._prefills else self._decode
        num_steps, elapsed = steps_until(seconds, time.perf_counter, step)
        return Measured(num_steps * self._step_tokens, elapsed)

    def _begin(self, point: Point) -> None:
        self._prefills, self._streams = point.mode == "prefill", point.streams

    @property
    def _step_tokens(self) -> int:
        return PREFILL_TOKENS if self._prefills else self._streams

    @abstractmethod
    def _decode(self) -> None:
        """Makes a token in each stream."""

    @abstractmethod
    def _prefill(self) -> None:
        """Reads a prompt of `PREFILL_TOKENS`."""


#: name -> (module, class, arguments)
CONTENDERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "gated": ("benchmarks.decode.native", "Native", ("gated",)),
    "elu": ("benchmarks.decode.native", "Native", ("elu",)),
    "gated-narrow": ("benchmarks.decode.native", "Narrow", ("gated",)),
    "gated-v4dot": ("benchmarks.decode.native", "Native", ("gated", "v4dot")),
    "llama": ("benchmarks.decode.llama", "LlamaCpp", ("llama",)),
    "rwkv7": ("benchmarks.decode.llama", "LlamaCpp", ("rwkv7",)),
    "generate": ("benchmarks.decode.pytorch", "Generate", ()),
    "eager": ("benchmarks.decode.pytorch", "OwnTorch", ("eager",)),
    "compile": ("benchmarks.decode.pytorch", "OwnTorch", ("compile",)),
}

#: The first of ours is what peers are compared with.
OURS = ("gated", "elu")
#: The same with the sums of its states in bfloat16.
NARROW = "gated-narrow"
#: The same at a level that is not the best one of the processor: without AMX.
LOWER_LEVEL = "gated-v4dot"
NATIVE_PEERS = ("llama", "rwkv7")

#: How tables call them.
TITLES = {
    "gated": "ours, gated",
    "elu": "ours, elu",
    NARROW: "ours, gated, sums in bfloat16",
    LOWER_LEVEL: "ours, gated, without AMX",
    "llama": "llama.cpp, Llama",
    "rwkv7": "llama.cpp, RWKV-7",
    "generate": "transformers, generate",
    "eager": "PyTorch, eager",
    "compile": "PyTorch, compiled",
}


def steps_until(
    seconds: float, now: Callable[[], float], step: Callable[[], None]
) -> tuple[int, float]:
    """Calls ``step`` until ``seconds`` are over, at least once; how often, and how long it took."""
    num_steps, start = 0, now()
    while True:
        step()
        num_steps += 1
        if (elapsed := now() - start) >= seconds:
            return num_steps, elapsed
