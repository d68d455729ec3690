"""Muon for the matrices inside the blocks, AdamW for all else.

Muon (Jordan et al. 2024, torch's own implementation) orthogonalises the
momentum of a matrix; with ``match_rms_adamw`` its steps are as large as AdamW's
(Liu et al. 2025, "Muon is Scalable for LLM Training", eq. 4), so both share one
learning rate. ``docs/notebook.md`` has the comparison with plain AdamW.
"""

from __future__ import annotations

import math

import torch
from torch import nn

BETAS = (0.9, 0.95)
FINAL_FRACTION = 0.05


def make_optimizers(
    model: nn.Module, kind: str, learning_rate: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """``kind`` is "muon" or "adamw". Norms, biases, vectors and the embedding are not decayed."""
    inside = {
        id(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("blocks.")
    }
    matrices = [parameter for parameter in model.parameters() if id(parameter) in inside]
    others = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    if kind == "adamw":
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return [torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS)]
    if kind != "muon":
        raise ValueError(f"optimizer must be 'muon' or 'adamw', not {kind!r}")
    return [
        torch.optim.Muon(
            matrices,
            lr=learning_rate,
            weight_decay=weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=learning_rate, betas=BETAS, weight_decay=0.0),
    ]


def learning_rate_factor(step: int, num_steps: int, warmup_steps: int) -> float:
    """Linear from 0 to 1 over the warm-up, then a cosine down to `FINAL_FRACTION`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return FINAL_FRACTION + (1.0 - FINAL_FRACTION) * cosine
