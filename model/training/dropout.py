"""Dropout of what each layer adds to the residual stream (Srivastava et al. 2014).

For texts that are read many times over. What a step drops depends on the seed and the step alone,
so that an interrupted run continues bit for bit.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.lm import Block, LanguageModel


class ResidualDropout:
    """Drops each channel of the outputs of attention and MLP with probability ``p`` in training.

    Raises `ValueError` for a network whose layers are not `model.lm.Block`.
    """

    def __init__(self, model: nn.Module, p: float, seed: int) -> None:
        self.p, self.seed = p, seed
        self._of_thread = threading.local()
        if not p:
            return
        if not isinstance(model, LanguageModel):
            raise ValueError("dropout is of the model_type 'everstream' alone")
        for block in model.blocks:
            assert isinstance(block, Block)
            for module in (block.attention.out, block.mlp.down):
                assert isinstance(module, nn.Module)
                module.register_forward_hook(self._drop)

    def start(self, step: int, row: int, device: torch.device) -> None:
        """From here on this thread computes the rows of a batch from ``row`` on."""
        if not self.p:
            return
        seed = int(np.random.SeedSequence((self.seed, step, row)).generate_state(1)[0])
        if device.type == "cuda":  # a graph takes its seed from the device's own generator
            torch.cuda.manual_seed(seed)
            return
        self._of_thread.generator = torch.Generator().manual_seed(seed)

    def _drop(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if not module.training:
            return output
        if output.is_cuda:
            return F.dropout(output, self.p)
        kept = torch.empty_like(output).bernoulli_(1 - self.p, generator=self._of_thread.generator)
        return output * kept / (1 - self.p)
