"""llama.cpp as a contender of `decode`, at its best.

Of flash attention on and off, of BF16 and F16, and of every number of threads up to the one given,
what is fastest in a short trial is measured.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import llama_cpp
import numpy as np

from benchmarks.decode.gguf import FILE_TYPES, gguf_file
from benchmarks.decode.llama_session import FLASH, ROOM, Session
from benchmarks.decode.peers import PREFILL_TOKENS, Measured, Opened, Point, Unavailable
from benchmarks.decode.roofline import ITEM_BYTES, Cost, matrix_cost
from benchmarks.decode.shapes import SIZES, Shapes, Size, count, peer_tensors
from benchmarks.machine import available_bytes

TRIAL_S = 0.1
#: A first step at less than this part of the best rate needs no second one.
HOPELESS = 0.6
#: Of memory that is available, what one context may take; there are two while they are compared.
MEMORY_PART = 0.4
F16_BYTES = 2
#: Without a cache that grows.
RECURRENT = ("rwkv7", "mamba2")
ERROR_LEVEL = 4  # GGML_LOG_LEVEL_ERROR


@llama_cpp.llama_log_callback
def _log_errors(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Keeps its errors for the worker's log, and nothing else."""
    if level == ERROR_LEVEL:
        sys.stderr.write(text.decode(errors="replace"))


@dataclass(frozen=True)
class Variant:
    """One way to run a model."""

    file_type: str
    flash: str
    threads: int

    def __str__(self) -> str:
        return f"{self.file_type}, flash attention {self.flash}, {self.threads} thread(s)"


class LlamaCpp:
    """A `decode.peers.Contender`: a "llama", one of `RECURRENT`, or a "hybrid" of both."""

    #: Which correspond to a type of ours; the fastest one is taken.
    file_types: ClassVar[Mapping[str, tuple[str, ...]]] = FILE_TYPES
    #: Tokens that a sequence may grow by while it is measured.
    room: ClassVar[int] = ROOM
    session: ClassVar[type[Session]] = Session

    def __init__(self, models: Path, architecture: str) -> None:
        llama_cpp.llama_log_set(_log_errors, None)
        llama_cpp.llama_backend_init()
        self.folder, self._architecture = models, architecture
        self._recurrent = architecture in RECURRENT
        self._loaded: dict[Path, Any] = {}
        self._best_file: dict[tuple[str, str, int, int], str] = {}
        self._session: Session | None = None

    def open(self, point: Point) -> Opened:
        self._close()
        size = self.size_of(point)
        self._check_memory(size, point)
        file_type = self._choose_file(point)
        best, variant = 0.0, Variant("", "", 0)
        for flash in self.flash_choices(point):
            session = self._start(point, file_type, flash)
            rate, threads = self._choose_threads(session)
            if rate <= best:
                session.free()
                continue
            self._close()
            best, self._session = rate, session
            variant = Variant(file_type, flash, threads)
        assert self._session is not None
        self._session.set_threads(variant.threads)
        return Opened(
            str(variant),
            count(self.tensors(size)),
            PREFILL_TOKENS if point.mode == "prefill" else point.streams,
            self.cost(size, point),
        )

    def run(self, seconds: float) -> Measured:
        assert self._session is not None
        return self._session.run(seconds)

    def size_of(self, point: Point) -> Size:
        """The shape of the model at ``point``."""
        return SIZES[point.size]

    def file(self, size: Size, file_type: str) -> Path:
        """The model's GGUF file, made where it is missing."""
        return gguf_file(self.folder, size, self._architecture, file_type)

    def tensors(self, size: Size) -> Shapes:
        """The model's tensors by name."""
        return peer_tensors(size, self._architecture)

    def flash_choices(self, point: Point) -> list[str]:
        """Of `FLASH`, what is tried: the fastest one is taken."""
        return ["off"] if self._recurrent else list(FLASH)

    def position_bytes(self, size: Size) -> int:
        """What a position takes in the cache."""
        return kv_bytes_per_token(size)

    def _close(self) -> None:
        if self._session is not None:
            self._session.free()
            self._session = None

    def _choose_file(self, point: Point) -> str:
        """The fastest file type at an empty context, tried once for each number of streams."""
        kinds = self.file_types[point.dtype]
        key = (point.size, point.mode, point.streams, point.threads)
        if len(kinds) > 1 and key not in self._best_file:
            empty = Point(point.size, point.dtype, point.streams, 0, point.threads, point.mode)
            rates = {}
            for kind in kinds:
                session = self._start(empty, kind, "off")
                rates[kind] = _rate(session)
                session.free()
            self._best_file[key] = max(kinds, key=lambda kind: rates[kind])
        return self._best_file[key] if len(kinds) > 1 else kinds[0]

    def _choose_threads(self, session: Session) -> tuple[float, int]:
        """Tokens/s and number of threads of the fastest."""
        rates: dict[int, float] = {}
        for threads in range(session.point.threads, 0, -1):
            session.set_threads(threads)
            rates[threads] = _rate(session, max(rates.values(), default=0.0))
        best = max(rates, key=lambda threads: rates[threads])
        return rates[best], best

    def _start(self, point: Point, file_type: str, flash: str) -> Session:
        size = self.size_of(point)
        path = self.file(size, file_type)
        if path not in self._loaded:
            self._free_other_sizes(point.size)
            params = llama_cpp.llama_model_default_params()
            loaded = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
            if loaded is None:
                raise Unavailable(f"it does not load {path.name}")
            self._loaded[path] = loaded
            check_sequences(self._loaded[path], size, self._recurrent, point)
        model = self._loaded[path]
        return self.session(model, size, self._recurrent, point, flash, self.room)

    def _free_other_sizes(self, name: str) -> None:
        for path in [path for path in self._loaded if not path.name.startswith(f"{name}-")]:
            llama_cpp.llama_model_free(self._loaded.pop(path))

    def _check_memory(self, size: Size, point: Point) -> None:
        wanted = point.streams * (point.context + self.room) * self.position_bytes(size)
        if not self._recurrent and wanted > MEMORY_PART * available_bytes():
            raise Unavailable(f"its cache would take {wanted / 2**30:.1f} GiB")

    def cost(self, size: Size, point: Point) -> Cost:
        """Of a step: weights read, state or cache read and written, and the arithmetic."""
        tensors = self.tensors(size)
        rows = PREFILL_TOKENS if point.mode == "prefill" else point.streams
        cost = matrix_cost(tensors, ITEM_BYTES[point.dtype], rows, point.streams, "token_embd")
        width = size.num_layers * size.hidden_size
        if self._recurrent:
            state = width * (size.head_dim + 2) * 4
            return cost + Cost(2 * state * point.streams, 5 * width * size.head_dim * rows)
        length = PREFILL_TOKENS // 2 if point.mode == "prefill" else point.context + ROOM // 2
        read = kv_bytes_per_token(size) * length * point.streams
        return cost + Cost(read, 4 * width * length * rows)


def check_sequences(model: Any, size: Size, recurrent: bool, point: Point) -> None:
    """Asserts that each sequence of a batch gets logits of its own, as it would alone."""
    tokens = [103, 205, 307, 411]  # the first ids of a trained model are special tokens
    together = Session(
        model, size, recurrent, Point(point.size, point.dtype, len(tokens), 0, point.threads), "off"
    )
    alone = Session(model, size, recurrent, Point(point.size, point.dtype, 1, 0, 1), "off")
    rows, single = together.logits(tokens), alone.logits(tokens[-1:])[0]
    together.free()
    alone.free()
    assert np.isfinite(rows).all(), "llama.cpp's logits are not finite"
    own, *others = (float(np.abs(row - single).max()) for row in rows[::-1])
    assert own < 0.1 * min(others), f"logits of one token differ by {own}, of others by {others}"


def kv_bytes_per_token(size: Size) -> int:
    """Of a Llama's cache in 16 bits."""
    return 2 * size.num_layers * size.hidden_size * F16_BYTES


def _rate(session: Session, to_beat: float = 0.0) -> float:
    """Tokens/s in a short trial; of the first step alone where ``to_beat`` is out of reach."""
    first = session.run(0.0)
    if first.tokens / first.seconds < HOPELESS * to_beat:
        return first.tokens / first.seconds
    measured = session.run(TRIAL_S)
    return measured.tokens / measured.seconds
