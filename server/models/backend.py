"""What runs the model: the native runtime where it is built and covers the model, else torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from model.architectures.config import Config
from model.checkpoint import Checkpoint
from model.native.runtime import (
    HELD_FILES,
    NATIVE_DTYPES,
    NativeError,
    Runtime,
    better_level_exists,
    num_cores,
    why_not_built,
)
from model.state import StateLayout
from model.tokenizer import Tokenizer
from model.weights import StoredWeights, Weights, is_quantized, num_parameters
from server.engine.cpu_state_pool import CpuStatePool
from server.engine.engine import Engine, EngineConfig
from server.engine.native_runner import NativeRunner
from server.engine.runner import Runner
from server.models.loading import WatchedWeights, loading

logger = logging.getLogger("everstream.backend")

Name = Literal["auto", "native", "torch"]


class BackendError(ValueError):
    """A backend or a dtype that was asked for and is not available. The message names its flag."""


@dataclass(frozen=True)
class Backend:
    """A model that is ready to run; ``make_runner`` puts it on the slots of a pool of its own.

    ``held`` names the numbers that its weights are held as, of which ``dtype`` is most: states
    of others differ.
    """

    name: str
    dtype: str
    held: str
    config: Config
    tokenizer: Tokenizer
    make_runner: Callable[[CpuStatePool], Runner]

    def engine(self, num_slots: int, config: EngineConfig) -> Engine:
        """An engine of ``num_slots`` sessions."""
        pool = CpuStatePool(StateLayout.of(self.config), num_slots)
        return Engine(self.config, self.tokenizer, pool, self.make_runner(pool), config)


def open_backend(
    checkpoint: Checkpoint, name: Name = "auto", dtype: str = "auto", threads: int | None = None
) -> Backend:
    """Loads the model's weights into what will run it, and logs which that is and why.

    ``dtype`` is auto or one of `model.native.runtime.DTYPES`, and ``threads`` None takes all
    cores for the native runtime and one thread for torch. Raises `BackendError`.
    """
    reason = "it was asked for"
    if name != "torch":
        try:
            return _native(checkpoint, dtype, threads or num_cores())
        except BackendError as error:
            if name == "native":
                raise BackendError(f"--backend native: {error}") from error
            reason = str(error)
    if dtype in NATIVE_DTYPES:
        raise BackendError(f"--dtype {dtype} needs the native runtime: {reason}")
    return _torch(checkpoint, dtype, threads or 1, reason)


def _native(checkpoint: Checkpoint, dtype: str, threads: int) -> Backend:
    """Raises `BackendError` where the runtime is not built or does not cover the model."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    if dtype == "auto":
        dtype = _auto_dtype(checkpoint.weights)
    if reason := why_not_built():
        raise BackendError(reason)
    weights = WatchedWeights(checkpoint.weights)
    try:
        with loading(num_parameters(config)) as progress:
            runtime = Runtime(
                *(config, weights, dtype, threads),
                num_ids=tokenizer.vocab_size,
                progress=progress,
            )
    except NativeError as error:
        raise BackendError(str(error)) from error
    weights.log(logger)
    if line := better_level_exists():
        logger.warning(line)
    logger.debug(
        "the native runtime runs the model: %s, %s weights, %d threads",
        *(runtime.level, runtime.held, threads),
    )
    return Backend(
        *("native", dtype, runtime.held, config, tokenizer),
        lambda pool: NativeRunner(runtime, pool),
    )


def _auto_dtype(weights: Weights) -> str:
    """What holds the numbers of a file on the native runtime."""
    if not is_quantized(weights):
        return "bfloat16"
    is_held = isinstance(weights, StoredWeights) and weights.stored_dtype in HELD_FILES
    return "int4" if is_held else "int8"


def _torch(checkpoint: Checkpoint, dtype: str, threads: int, reason: str) -> Backend:
    try:
        import torch

        from model.architectures.network import model_of
        from server.engine.torch_runner import TorchRunner
    except ImportError as error:
        raise BackendError(
            "torch is not installed (pip install 'everstream[torch]'), and the native runtime:"
            f" {reason}"
        ) from error
    from model.memory import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(threads)
    if dtype == "auto":  # where the processor multiplies bfloat16 natively
        dtype = "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
    precision = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    weights = WatchedWeights(checkpoint.weights)
    model = model_of(checkpoint.config, weights, precision)
    weights.log(logger)
    logger.info("torch runs the model, many times slower than the native runtime: %s", reason)
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    num_ids = tokenizer.vocab_size
    return Backend(
        "torch", dtype, dtype, config, tokenizer, lambda pool: TorchRunner(model, pool, num_ids)
    )
