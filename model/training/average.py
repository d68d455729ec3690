"""The mean of the weights of several models of one shape (Wortsman et al. 2022, "Model soups").

Models that continued from the same weights lie near one another, and between them the loss is
often lower than at either.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from model.checkpoint import load_checkpoint, save_checkpoint
from model.training import TrainingError


def average(models: Sequence[str | Path], out: Path) -> None:
    """Writes the mean of ``models``, folders or names, to the folder ``out``.

    Sums are in float64. Raises `TrainingError` where shapes or tokenizers differ, and what
    `load_checkpoint` raises.
    """
    first, *others = (load_checkpoint(model) for model in models)
    total = {name: tensor.double() for name, tensor in first.model.state_dict().items()}
    for model, other in zip(models[1:], others, strict=True):
        if other.config != first.config or other.tokenizer.digest != first.tokenizer.digest:
            raise TrainingError(f"{model} has another shape or tokenizer than {models[0]}")
        for name, tensor in other.model.state_dict().items():
            total[name] += tensor.double()
    network = first.model
    network.load_state_dict({name: (t / len(models)).float() for name, t in total.items()})
    save_checkpoint(out, network, first.tokenizer, torch.float32)
