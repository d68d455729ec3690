"""What runs the model: the native runtime where it covers the model, else torch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TextIO

import numpy as np

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
from model.tensor_spec import Shape
from model.tokenizer import Tokenizer
from model.weights import Array, StoredWeights, Weights, is_quantized, num_parameters, shape_in
from model.weights.gguf_file import block_scales
from server.engine.engine import Engine, EngineConfig
from server.engine.model_drafter import HeadDrafter
from server.engine.runner import CpuStatePool, NativeRunner, Runner

if TYPE_CHECKING:
    from model.foreign import MultiTokenHead

# -------------------------------------------------------------------------------------------------
# The loading of weights: its progress is shown, and numbers that no training leaves are reported.
#
# A file may be whole and its numbers broken all the same, by a conversion or on the disk where it
# was trained. The model then loads, and writes nonsense or nothing.


loading_logger = logging.getLogger("everstream.loading")

#: Weights of which nothing is shown: they load in a second or so.
FEW = 100_000_000

NOT_FINITE = "has numbers that are not finite"
ZEROS = "is the weight of a norm and is zero everywhere"

Progress = Callable[[int], None]


@contextmanager
def loading(num_weights: int, stream: TextIO | None = None) -> Iterator[Progress]:
    """Gives a function to call with how many of ``num_weights`` have been read.

    It shows a bar where ``stream``, by default standard error, is a terminal; else it logs a
    line per quarter.
    """
    stream = stream or sys.stderr
    if num_weights <= FEW:
        yield lambda num_read: None
    elif stream.isatty():
        with _bar(num_weights, stream) as progress:
            yield progress
    else:
        yield _lines(num_weights)


@contextmanager
def _bar(num_weights: int, stream: TextIO) -> Iterator[Progress]:
    from rich import progress
    from rich.console import Console

    with progress.Progress(console=Console(file=stream)) as bar:
        task = bar.add_task("loading the weights", total=num_weights)
        yield lambda num_read: bar.update(task, completed=num_read)


def _lines(num_weights: int) -> Progress:
    shown = 0

    def progress(num_read: int) -> None:
        nonlocal shown
        quarters = min(4, 4 * num_read // num_weights)
        if quarters > shown:
            shown = quarters
            loading_logger.info("loading the weights: %d%%", 25 * quarters)

    return progress


class WatchedWeights(StoredWeights):
    """``weights``, of which each tensor is looked at when it is read."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        self._weights = weights
        self._found: dict[str, str] = {}

    def log(self, logger: logging.Logger) -> None:
        """Warns of what was found in those that were read, with the name of the first tensor."""
        for name, what in list(self._found.items())[:1]:
            more = f" ({len(self._found)} such tensors)" if len(self._found) > 1 else ""
            loading_logger.warning("%s %s%s: the model's file may be damaged", name, what, more)

    def __getitem__(self, name: str) -> Array:
        return self._seen(name, self._weights[name])

    def rows(self, name: str, begin: int, end: int | None) -> Array:
        if isinstance(self._weights, StoredWeights):
            return self._seen(name, self._weights.rows(name, begin, end))
        return self._seen(name, self._weights[name][begin:end])

    def _seen(self, name: str, rows: Array) -> Array:
        """One pass: the sum of squares is finite and not zero in a good tensor."""
        with np.errstate(all="ignore"):
            flat = rows.reshape(-1)
            squares = np.dot(flat, flat)
        if not np.isfinite(squares) and not np.isfinite(flat).all():
            self._found[name] = NOT_FINITE
        elif squares == 0 and "norm" in name and name.endswith("weight") and not flat.any():
            self._found[name] = ZEROS
        return rows

    def block_kind(self, name: str) -> str | None:
        if isinstance(self._weights, StoredWeights):
            return self._weights.block_kind(name)
        return None

    def blocks(self, name: str, begin: int, end: int | None) -> Array:
        """See `StoredWeights`; numbers are finite where their scales are."""
        assert isinstance(self._weights, StoredWeights), name
        rows, kind = self._weights.blocks(name, begin, end), self.block_kind(name)
        assert kind is not None, name
        self._seen(name, block_scales(rows, kind))
        return rows

    def release(self) -> None:
        if isinstance(self._weights, StoredWeights):
            self._weights.release()

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def shape(self, name: str) -> Shape:
        return shape_in(self._weights, name)

    def is_float(self, name: str) -> bool:
        if isinstance(self._weights, StoredWeights):
            return self._weights.is_float(name)
        return self._weights[name].dtype.kind == "f"

    @property
    def stored_dtype(self) -> str:
        if isinstance(self._weights, StoredWeights):
            return self._weights.stored_dtype
        return "float32"

    def dtype_of(self, name: str) -> str:
        if isinstance(self._weights, StoredWeights):
            return self._weights.dtype_of(name)
        return "float32"


logger = logging.getLogger("everstream.backend")

Name = Literal["auto", "native", "torch"]


class BackendError(ValueError):
    """A backend or a dtype that was asked for and is not available. The message names its flag."""


@dataclass(frozen=True)
class Backend:
    """A model that is ready to run; ``make_runner`` puts it on the slots of a pool of its own.

    ``held`` names the numbers that its weights are held as, of which ``dtype`` is most: states
    of others differ. ``open_head`` loads the model's multi-token head, where it has one.
    """

    name: str
    dtype: str
    held: str
    config: Config
    tokenizer: Tokenizer
    make_runner: Callable[[CpuStatePool], Runner]
    open_head: Callable[[], Runtime] | None = None

    def engine(self, num_slots: int, config: EngineConfig) -> Engine:
        """An engine of ``num_slots`` sessions."""
        pool = CpuStatePool(StateLayout.of(self.config), num_slots)
        runner = self.make_runner(pool)
        if isinstance(config.drafter, HeadDrafter):
            runner = config.drafter.watch(runner)
        return Engine(self.config, self.tokenizer, pool, runner, config)


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
        None if checkpoint.head is None else partial(_head, checkpoint.head, runtime),
    )


def _head(head: MultiTokenHead, model: Runtime) -> Runtime:
    """In the numbers of its model, whose embedding and head it has."""
    weights, num_ids = WatchedWeights(head.weights), model.num_ids
    runtime = Runtime(
        *(head.config, weights, model.dtype, model.threads, model.level, num_ids), base=model
    )
    weights.log(logger)
    return runtime


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
