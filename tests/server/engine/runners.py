"""Both runners on the tiny models, by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from model.checkpoint import Checkpoint
from model.native.runtime import Runtime
from model.state import StateLayout
from server.engine.runner import CpuStatePool, Feed, NativeRunner, Runner
from server.engine.torch_runner import TorchRunner
from tests.requirements import needs_native
from tests.tiny import tiny_checkpoint

BACKENDS = [pytest.param("native", marks=needs_native), "torch"]
#: Of float32 logits, relative to the largest; as in tests/model/ops/cpu/test_language_model.py.
TOLERANCE = 5e-6


def make_pool(name: str = "gated", num_slots: int = 4) -> CpuStatePool:
    return CpuStatePool(StateLayout.of(tiny_checkpoint(name).config), num_slots)


def make_runner(
    backend: str,
    pool: CpuStatePool,
    name: str = "gated",
    num_ids: int | None = None,
    checkpoint: Checkpoint | None = None,
) -> Runner:
    checkpoint = checkpoint or tiny_checkpoint(name)
    num_ids = num_ids or checkpoint.config.vocab_size
    if backend == "torch":
        return TorchRunner(checkpoint.model, pool, num_ids)
    runtime = Runtime(checkpoint.config, checkpoint.weights, "float32", num_ids=num_ids)
    return NativeRunner(runtime, pool)


def drawn(runner: Runner, feeds: Sequence[Feed]) -> list[int]:
    """What each row draws: one token, `NOT_FINITE`, or -1 where it draws none."""
    return [tokens[0] if tokens else -1 for tokens, _, _ in runner.run(feeds)]
