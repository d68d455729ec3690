"""Our native runtime, through the interface that the server uses: one call for a step of a batch.

Each stream draws its next token greedily, in the same call. The first 8,192 tokens of a past
are a real prefill; beyond them the position alone is moved, as the state does not grow.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from benchmarks.decode.models import checkpoint, step_cost
from benchmarks.decode.peers import PREFILL_TOKENS, Opened, Point, Steps, Unavailable
from benchmarks.decode.roofline import ITEM_BYTES, Cost
from benchmarks.decode.shapes import SIZES
from model.architectures.config import Config, with_state_dtype
from model.checkpoint_files import read_weights
from model.config import ModelConfig
from model.native.runtime import Runtime, levels
from model.weights import num_parameters

MAX_READ_TOKENS = 8192
WARM_UP_S = 0.05


class Native(Steps):
    """A `decode.peers.Contender`: our model with one attention.

    With a ``level`` it takes part where the processor has a better one than that.
    """

    #: Of a past, what is a real prefill.
    max_read_tokens: ClassVar[int] = MAX_READ_TOKENS

    def __init__(self, models: Path, attention: str, level: str | None = None) -> None:
        self.folder, self._attention, self._level = models, attention, level
        self._loaded: tuple[str, str, int] | None = None

    def open(self, point: Point) -> Opened:
        if self._level is not None and self._level not in levels()[1:]:
            raise Unavailable(f"{self._level} is not a lower level of this processor")
        self._load(point)
        self._begin(point)
        self._draws = [self._runtime.draw(temperature=0.0, seed=i) for i in range(point.streams)]
        self._slots = list(range(point.streams))
        self._pool = self._runtime.empty_pool(point.streams)
        self._read(min(point.context, self.max_read_tokens))
        self._positions = [point.context] * point.streams
        ids = np.random.default_rng(0).integers(
            1, self._runtime.config.vocab_size, size=PREFILL_TOKENS
        )
        self._prompt = ids.tolist()
        self._tokens = [[self._prompt[slot % len(self._prompt)]] for slot in self._slots]
        self.run(WARM_UP_S)
        cost = self.cost(ITEM_BYTES[point.dtype], self._step_tokens, point)
        parameters = num_parameters(self._runtime.config)
        return Opened(point.dtype, parameters, self._step_tokens, cost)

    def make_runtime(self, point: Point) -> Runtime:
        """The model of ``point``, ready to run."""
        path = checkpoint(self.folder, SIZES[point.size], self._attention)
        config = self.config(path)
        return Runtime(config, read_weights(path), point.dtype, point.threads, self._level)

    def config(self, path: Path) -> Config:
        """Of the model in a folder."""
        return ModelConfig.load(path / "config.json")

    def cost(self, item_bytes: float, rows: int, point: Point) -> Cost:
        """Of a step of ``rows`` tokens."""
        config = self._runtime.config
        assert isinstance(config, ModelConfig)
        return step_cost(config, item_bytes, rows, point.streams)

    def _load(self, point: Point) -> None:
        """The weights of ``point``, unless they are there."""
        wanted = (point.size, point.dtype, point.threads)
        if self._loaded == wanted:
            return
        self._runtime = self.make_runtime(point)
        self._loaded = wanted

    def _read(self, num_tokens: int) -> None:
        """Feeds the first stream and copies its state into the others."""
        draw = np.random.default_rng(1)
        for first in range(0, num_tokens, PREFILL_TOKENS):
            size = min(PREFILL_TOKENS, num_tokens - first)
            ids = draw.integers(1, self._runtime.config.vocab_size, size=size).tolist()
            self._runtime.run(self._pool, [0], [first], [ids], [None])
        used = self._runtime.layout.used_bytes(num_tokens)
        self._pool[1:, :used] = self._pool[0, :used]

    def _decode(self) -> None:
        tokens = self._runtime.run(
            self._pool, self._slots, self._positions, self._tokens, self._draws
        )
        assert all(token >= 0 for (token,) in tokens), tokens
        self._tokens = tokens
        self._positions = [position + 1 for position in self._positions]

    def _prefill(self) -> None:
        self._pool[0] = 0
        ((token,),) = self._runtime.run(self._pool, [0], [0], [self._prompt], self._draws)
        assert token >= 0, token


class Narrow(Native):
    """The same with the sums of a state in bfloat16."""

    def config(self, path: Path) -> Config:
        """See `Native`."""
        return with_state_dtype(super().config(path), "bfloat16")
