"""Everstream's native runtime on a GGUF file."""

from __future__ import annotations

from pathlib import Path

from benchmarks.checkpoints.shapes import CONFIGS, file_of
from benchmarks.decode.models import step_cost
from benchmarks.decode.native import Native
from benchmarks.decode.peers import Point
from benchmarks.decode.roofline import Cost
from model.checkpoint import load_checkpoint
from model.native.runtime import Runtime


class FromFile(Native):
    """A `decode.peers.Contender`; Q8_0 becomes the runtime's int8, a scale for each row."""

    def __init__(self, models: Path) -> None:
        super().__init__(models, "rwkv7")

    def make_runtime(self, point: Point) -> Runtime:
        loaded = load_checkpoint(file_of(self.folder, point.size, point.dtype))
        return Runtime(loaded.config, loaded.weights, point.dtype, point.threads)

    def cost(self, item_bytes: int, rows: int, point: Point) -> Cost:
        return step_cost(CONFIGS[point.size], item_bytes, rows, point.streams)
