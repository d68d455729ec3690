"""Muon for the matrices inside the blocks, AdamW for all else.

Muon (Jordan et al. 2024, torch's own implementation) orthogonalises the
momentum of a matrix; with ``match_rms_adamw`` its steps are as large as AdamW's
(Liu et al. 2025, "Muon is Scalable for LLM Training", eq. 4). Where one weight
holds several matrices (`model.ops.layers.FusedLinear`), each is orthogonalised on
its own. ``docs/contribute/notebook.md`` has the comparison with plain AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from model.ops.layers import FusedLinear

BETAS = (0.9, 0.95)


class SplitMuon(torch.optim.Muon):
    """Muon over the matrices inside of weights: ``parts`` are the rows of each, per weight."""

    def __init__(self, weights: list[tuple[nn.Parameter, tuple[int, ...]]], **options: Any) -> None:
        self._pieces = [
            (weight, [nn.Parameter(rows) for rows in weight.detach().split(parts)], parts)
            for weight, parts in weights
        ]
        super().__init__([piece for _, pieces, _ in self._pieces for piece in pieces], **options)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The whole weights, whose gradients `step` reads."""
        return [weight for weight, _, _ in self._pieces]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._split_gradients()
        super().step(closure)  # type: ignore[no-untyped-call]

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for weight in self.weights:
            weight.grad = None

    def _split_gradients(self) -> None:
        for weight, pieces, parts in self._pieces:
            if weight.grad is not None:
                for piece, rows in zip(pieces, weight.grad.split(parts), strict=True):
                    piece.grad = rows


class StackedMuon(SplitMuon):
    """`SplitMuon` whose step multiplies all matrices of a shape at once, with its rate in a tensor.

    A CUDA graph can hold such a step (`model.training.passes`).
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._split_gradients()
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for piece in (piece for piece in group["params"] if piece.grad is not None):
                shapes.setdefault(piece.shape, []).append(piece)
            for shape, pieces in shapes.items():
                updates = _orthogonalized(self._momenta(pieces, group["momentum"]), group)
                rate = group["lr"] * 0.2 * math.sqrt(max(shape))  # as `match_rms_adamw`
                torch._foreach_mul_(pieces, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_sub_(pieces, list((updates * rate).unbind()))

    def _momenta(self, pieces: list[Tensor], momentum: float) -> Tensor:
        """Nesterov's, [N, rows, columns]; those of before are moved towards the gradients."""
        gradients = [cast(Tensor, piece.grad) for piece in pieces]
        for piece in pieces:
            if "momentum_buffer" not in self.state[piece]:
                self.state[piece]["momentum_buffer"] = torch.zeros_like(piece)
        buffers = [self.state[piece]["momentum_buffer"] for piece in pieces]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        return torch.stack(gradients).lerp(torch.stack(buffers), momentum)


def _orthogonalized(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """The Newton-Schulz iteration of torch's Muon for [N, rows, columns] at once."""
    a, b, c = group["ns_coefficients"]
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.flatten(1).norm(dim=1).clamp_min(group["eps"])[:, None, None]
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def make_optimizers(
    model: nn.Module,
    kind: str,
    learning_rate: float,
    weight_decay: float,
    embedding_learning_rate: float | None = None,
) -> list[torch.optim.Optimizer]:
    """``kind`` is "muon" or "adamw". Norms, biases, vectors and the embedding are not decayed.

    Every group keeps its peak rate as ``peak_lr``. ``embedding_learning_rate`` is that of what
    is not a matrix inside a block; None is ``learning_rate``. With Muon there is one optimizer
    per block, so that threads can share the work, and the last is AdamW. On a CUDA device there is
    one for all blocks, and every rate is a tensor there, so that a graph can hold the steps.
    """
    device = next(model.parameters()).device
    captured: dict[str, Any] = {"capturable": True} if device.type == "cuda" else {}
    blocks: dict[str, list[tuple[nn.Parameter, tuple[int, ...]]]] = {}
    for name, parts, weight in _matrices(model):
        blocks.setdefault(".".join(name.split(".")[:2]), []).append((weight, parts))
    inside = {id(weight) for block in blocks.values() for weight, _ in block}
    matrices = [parameter for parameter in model.parameters() if id(parameter) in inside]
    others = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    rest = {"params": others, "weight_decay": 0.0, "lr": embedding_learning_rate or learning_rate}
    if kind == "adamw":
        groups = [{"params": matrices, "weight_decay": weight_decay}, rest]
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, **captured)
        ]
    elif kind == "muon":
        sets, muon = list(blocks.values()), SplitMuon
        if captured:
            sets, muon = [[weight for block in sets for weight in block]], StackedMuon
        optimizers = [
            muon(some, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            for some in sets
        ]
        optimizers.append(torch.optim.AdamW([rest], betas=BETAS, **captured))
    else:
        raise ValueError(f"optimizer must be 'muon' or 'adamw', not {kind!r}")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
            if captured:
                group["lr"] = torch.tensor(float(group["lr"]), device=device)
    return optimizers


def _matrices(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...], nn.Parameter]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.startswith("blocks."):
            parts = module.parts if isinstance(module, FusedLinear) else (module.out_features,)
            yield name, parts, cast(nn.Parameter, module.weight)


def prepare_step(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Clears the gradients and sets the rates to ``factor`` of their peaks."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    set_rates(optimizers, factor)


def set_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Sets the rates to ``factor`` of their peaks; those in tensors stay in the same ones."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group["peak_lr"] * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def learning_rate_factor(
    step: int, num_steps: int, warmup_steps: int, decay_steps: int | None = None
) -> float:
    """Linear from 0 to 1 over the warm-up, and linear to 0 over the last ``decay_steps``.

    None decays from the end of the warm-up on. Until the decay begins the factor does not
    depend on ``num_steps``, so that a run can be made longer or shorter.
    """
    if decay_steps is None:
        decay_steps = num_steps - warmup_steps
    warmup = min(1.0, (step + 1) / max(1, warmup_steps))
    return min(warmup, 1.0, (num_steps - step) / max(1, decay_steps))


def gradients(loss: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """The gradients of ``loss``; zeros where a parameter has none."""
    return list(torch.autograd.grad(loss, parameters, materialize_grads=True))
