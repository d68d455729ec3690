"""Everstream's native runtime on a GGUF file, and the `rwkv` package on the same weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from benchmarks.checkpoints import chat, hybrids
from benchmarks.checkpoints.folders import config_of, gguf_of
from benchmarks.checkpoints.shapes import CONFIGS, file_of
from benchmarks.decode.models import step_cost
from benchmarks.decode.native import Native
from benchmarks.decode.peers import PREFILL_TOKENS, Opened, Point, Steps, Unavailable
from benchmarks.decode.roofline import ITEM_BYTES, Cost, runtime_dtype
from model.architectures.hybrid import HybridConfig, with_past
from model.checkpoint import load_checkpoint
from model.native.runtime import Runtime
from model.weights import num_parameters

#: Of its strategies on a CPU, the one for weights of this type.
STRATEGIES = {"float32": "cpu fp32", "bfloat16": "cpu bf16"}
WARM_UP_S = 0.05


class FromFile(Native):
    """A `decode.peers.Contender`; Q8_0 becomes int8 with a scale for each row, Q4_0 is int4."""

    def __init__(self, models: Path) -> None:
        super().__init__(models, "rwkv7")

    def make_runtime(self, point: Point) -> Runtime:
        loaded = load_checkpoint(file_of(self.folder, point.size, point.dtype))
        return Runtime(loaded.config, loaded.weights, runtime_dtype(point.dtype), point.threads)

    def cost(self, item_bytes: float, rows: int, point: Point) -> Cost:
        return step_cost(CONFIGS[point.size], item_bytes, rows, point.streams)


class HybridFromFile(Native):
    """A `decode.peers.Contender`; Q8_0 becomes int8 with a scale for each row, Q4_0 is int4."""

    def __init__(self, models: Path) -> None:
        super().__init__(models, "hybrid")

    def make_runtime(self, point: Point) -> Runtime:
        file = hybrids.file_of(self.folder, point.size, point.dtype)
        loaded = load_checkpoint(file)
        assert isinstance(loaded.config, HybridConfig)
        bounded = with_past(loaded.config, hybrids.CONTEXT, "stop")
        return Runtime(bounded, loaded.weights, runtime_dtype(point.dtype), point.threads)

    def cost(self, item_bytes: float, rows: int, point: Point) -> Cost:
        return hybrids.step_cost(point, 2 * hybrids.position_numbers(hybrids.CONFIGS[point.size]))


class MambaFromFile(Native):
    """A `decode.peers.Contender`; Q8_0 becomes int8 with a scale for each row, Q4_0 is int4."""

    def __init__(self, models: Path) -> None:
        super().__init__(models, "mamba2")

    def make_runtime(self, point: Point) -> Runtime:
        loaded = load_checkpoint(gguf_of(self.folder, point.size, point.dtype))
        return Runtime(loaded.config, loaded.weights, runtime_dtype(point.dtype), point.threads)

    def cost(self, item_bytes: float, rows: int, point: Point) -> Cost:
        return step_cost(config_of(point.size), item_bytes, rows, point.streams)


class Chat(Native):
    """A `decode.peers.Contender`: the bundled chat model. It reads the whole past, once."""

    max_read_tokens: ClassVar = 1 << 20

    def __init__(self, models: Path) -> None:
        super().__init__(models, "llama")

    def open(self, point: Point) -> Opened:
        self._context = point.context
        return super().open(point)

    def make_runtime(self, point: Point) -> Runtime:
        self._pasts: dict[int, npt.NDArray[np.uint8]] = {}  # states by their positions
        loaded = load_checkpoint(chat.FOLDER)
        return Runtime(loaded.config, loaded.weights, point.dtype, point.threads)

    def cost(self, item_bytes: float, rows: int, point: Point) -> Cost:
        return chat.state_cost(self._runtime.num_bytes, point)

    def _read(self, num_tokens: int) -> None:
        if num_tokens not in self._pasts:
            super()._read(num_tokens)
            self._pasts[num_tokens] = self._pool[0].copy()
        self._pool[:] = self._pasts[num_tokens]

    def _decode(self) -> None:
        if self._positions[0] >= self._context + chat.ROOM:  # what it reads, not its numbers
            self._positions = [self._context] * self._streams
        super()._decode()


class Package(Steps):
    """A `decode.peers.Contender` of one stream."""

    def __init__(self, models: Path) -> None:
        self._folder = models
        self._loaded: tuple[str, str] | None = None

    def open(self, point: Point) -> Opened:
        if point.streams > 1:
            raise Unavailable("it runs one stream")
        if point.dtype not in STRATEGIES:
            raise Unavailable(f"it has no {point.dtype} on a CPU")
        if self._loaded != (point.size, point.dtype):
            self._load(point)
        self._begin(point)
        config = CONFIGS[point.size]
        draw = np.random.default_rng(0)
        self._prompt = draw.integers(1, config.vocab_size, size=PREFILL_TOKENS).tolist()
        self._state: Any = None
        self._token = self._prompt[0]
        self.run(WARM_UP_S)
        cost = step_cost(config, ITEM_BYTES[point.dtype], self._step_tokens, 1)
        return Opened(STRATEGIES[point.dtype], num_parameters(config), self._step_tokens, cost)

    def _load(self, point: Point) -> None:
        os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "0"}
        from rwkv.model import RWKV

        self._model: Any = None  # the one before goes first
        file = file_of(self._folder, point.size, "pth")
        self._model = RWKV(model=str(file.with_suffix("")), strategy=STRATEGIES[point.dtype])
        self._loaded = (point.size, point.dtype)

    def _decode(self) -> None:
        logits, self._state = self._model.forward([self._token], self._state)
        self._token = int(logits.argmax())

    def _prefill(self) -> None:
        logits, _ = self._model.forward(self._prompt, None)
        assert np.isfinite(float(logits.max()))
