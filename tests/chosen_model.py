"""The model that tests take in the place of a tiny one: that of ``EVERSTREAM_TEST_MODEL``.

It is a folder or a file. What a test says of texts and states holds for any model; tests that know
the vocabulary or the size of the tiny one keep it.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from model.bundled_models import DEFAULT_MODEL
from model.checkpoint import Checkpoint, load_checkpoint
from model.native.runtime import Runtime
from model.state import StateLayout
from server.engine.engine import Engine
from server.engine.runner import CpuStatePool, NativeRunner, Runner
from server.engine.torch_runner import TorchRunner
from tests.tiny import engine_of, write_model

VARIABLE = "EVERSTREAM_TEST_MODEL"
#: Its name among the mechanisms of tiny models.
CHOSEN = "chosen"


def chosen_model() -> Path | None:
    """That of the variable, if it is set."""
    name = os.environ.get(VARIABLE)
    return Path(name).resolve() if name else None


def served_model(folder: Path) -> Path:
    """The chosen model, or a tiny one that is written to ``folder``."""
    return chosen_model() or write_model(folder)


def bundled_model() -> Path:
    """The chosen model, or the bundled one."""
    return chosen_model() or DEFAULT_MODEL


def chosen_engine(backend: str, max_sessions: int = 8, **config: object) -> Engine:
    """An engine of the chosen model, on torch or in int8 on the native runtime."""
    model = chosen_model()
    assert model is not None, f"{VARIABLE} is not set"
    checkpoint = _checkpoint(model)
    pool = CpuStatePool(StateLayout.of(checkpoint.config), max_sessions)
    num_ids = checkpoint.tokenizer.vocab_size
    runner: Runner = (
        NativeRunner(_runtime(model), pool)
        if backend == "native"
        else TorchRunner(checkpoint.model, pool, num_ids, (64, 16))
    )
    return engine_of(checkpoint, runner, pool, **config)


@cache
def _checkpoint(model: Path) -> Checkpoint:
    return load_checkpoint(model)


@cache
def _runtime(model: Path) -> Runtime:
    """It keeps nothing of a session."""
    checkpoint = _checkpoint(model)
    num_ids = checkpoint.tokenizer.vocab_size
    return Runtime(checkpoint.config, checkpoint.weights, "int8", num_ids=num_ids)
