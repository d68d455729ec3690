"""The bundled chat model, and the GGUF file that it is an adapter over: what a step of each costs.

A runtime of int4 holds the blocks of the file as they are, and in int8 what the adapter changes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from benchmarks.decode.peers import PREFILL_TOKENS, Point
from benchmarks.decode.roofline import Cost, matrix_cost
from model.bundled_models import bundled_models
from model.families.llama.config import LlamaConfig
from model.hub.base import base_of
from model.state import StateLayout, kv_cache_bytes_per_token

FOLDER = bundled_models()["smollm2"]
SIZE = "smollm2-135M"
CONFIG = LlamaConfig.load(FOLDER / "config.json")
ORIGINAL = replace(CONFIG, windows=())
#: Tokens that a stream may grow by before it is set back to the past that is measured.
ROOM = 128
#: Of a number of S in one token: three heads of queries read it, and a product is added.
OPERATIONS_PER_STATE_NUMBER = 8


def file_of(folder: Path, size: str, dtype: str) -> Path:
    """The base, which has its own place and type. Raises `BaseError` where it is missing."""
    return base_of(FOLDER)


def position_bytes() -> int:
    """What a position takes in the cache of the original."""
    return kv_cache_bytes_per_token(ORIGINAL)


def original_cost(file_bytes: int, point: Point) -> Cost:
    """Of a step of the original at ``point``: each layer reads the whole past."""
    return _step_cost(file_bytes, point, [_seen(point)] * CONFIG.num_hidden_layers)


def state_cost(runtime_bytes: int, point: Point) -> Cost:
    """Of a step of constant state: windows are read, sums that are not empty read and written.

    A runtime's weights have the head in int8 twice: as the embedding, too.
    """
    seen = _seen(point)
    positions = [min(seen, plan.context) for plan in CONFIG.windows]
    numbers = sum(
        math.prod(field.spec.shape)
        for field in StateLayout.of(CONFIG).fields
        if field.name in ("S", "z") and seen > CONFIG.windows[field.layer].context
    )
    return _step_cost(
        runtime_bytes - CONFIG.vocab_size * CONFIG.hidden_size, point, positions
    ) + Cost(2 * 4 * numbers * point.streams, OPERATIONS_PER_STATE_NUMBER * numbers * _rows(point))


def _seen(point: Point) -> int:
    """Positions that a token attends to where nothing is cut, on average."""
    return PREFILL_TOKENS // 2 if point.mode == "prefill" else point.context + ROOM // 2


def _rows(point: Point) -> int:
    return PREFILL_TOKENS if point.mode == "prefill" else point.streams


def _step_cost(weight_bytes: int, point: Point, positions: list[int]) -> Cost:
    """All weights are read, and by each layer the keys and values of so many ``positions``."""
    heads, read = CONFIG.num_attention_heads * CONFIG.head_dim, sum(positions)
    shapes = {**ORIGINAL.weight_shapes(), "head.weight": (CONFIG.vocab_size, CONFIG.hidden_size)}
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    return matrix_cost(matrices, 0, _rows(point), point.streams, "embedding") + Cost(
        weight_bytes + point.streams * read * position_bytes() // CONFIG.num_hidden_layers,
        4 * heads * read * _rows(point),
    )
