"""Weights as int4 for the inputs that the matrices of a model have while it reads a text.

All windows of the text are read at once. When a matrix is reached, it is rounded for its inputs
(`model.quantization.gptq`) and replaced, so that those after it see inputs as they will be. This
needs torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from model.architectures.bounded import with_past
from model.architectures.network import model_of
from model.checkpoint import Checkpoint
from model.evaluation import DataError, documents
from model.quantization.gptq import Double, gptq
from model.weights.int4 import Int4

WINDOW = 512
#: Windows that are read of a text, and those that it must have.
MAX_WINDOWS, MIN_WINDOWS = 64, 4
#: Rows of inputs that are widened to float64 at a time.
_ROWS = 4096


@torch.no_grad()
def calibrated(
    checkpoint: Checkpoint, names: Collection[str], text: Path, threads: int
) -> dict[str, Int4]:
    """The matrices of these ``names`` as int4 for the inputs that the ``text`` gives them.

    The first `MAX_WINDOWS` windows of the text are read, `WINDOW` tokens each, from the empty
    state. Raises `DataError` for a text of fewer than `MIN_WINDOWS` and for a file that is no text.
    """
    windows, config = _windows(checkpoint, text), checkpoint.config
    if config.context:
        config = with_past(config, WINDOW, "stop")
    model = model_of(config, checkpoint.weights)
    torch.set_num_threads(threads)
    found: dict[str, Int4] = {}
    for name in names:
        layer = model.get_submodule(name.removesuffix(".weight"))
        layer.register_forward_pre_hook(partial(_round, found, name))
    model.hidden_parallel(windows)
    assert found.keys() == set(names), set(names) - found.keys()
    return found


def _round(found: dict[str, Int4], name: str, layer: nn.Module, inputs: tuple[Tensor]) -> None:
    """Replaces the weight of a layer that is about to multiply ``inputs`` [..., k]."""
    assert isinstance(layer, nn.Linear), name
    found[name] = gptq(layer.weight.numpy(), _products(inputs[0]))
    layer.weight.copy_(torch.from_numpy(found[name].numbers()))


def _products(inputs: Tensor) -> Double:
    """The sum of x x^T over the rows of [..., k]."""
    rows = inputs.flatten(end_dim=-2)
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    for part in rows.split(_ROWS):
        wide = part.double()
        total += wide.T @ wide
    return total.numpy()


def _windows(checkpoint: Checkpoint, text: Path) -> Tensor:
    """The windows, [B, T] int64; the text's documents follow the token of an end each."""
    ids: list[int] = []
    for part in _texts(text):
        ids += [checkpoint.tokenizer.eos_token_id, *checkpoint.tokenizer.encode(part)]
        if len(ids) >= MAX_WINDOWS * WINDOW:
            break
    num = min(len(ids) // WINDOW, MAX_WINDOWS)
    if num < MIN_WINDOWS:
        raise DataError(
            f"{text} has {len(ids):,} tokens, too few to calibrate: it takes"
            f" {MIN_WINDOWS * WINDOW:,}, and {MAX_WINDOWS * WINDOW:,} are better"
        )
    return torch.from_numpy(np.array(ids[: num * WINDOW])).view(num, WINDOW)


def _texts(path: Path) -> Iterator[str]:
    """Its documents. Raises `DataError` where it is not UTF-8."""
    try:
        yield from documents(path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a text in UTF-8: {error.reason}") from error
