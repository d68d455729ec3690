"""Each layer of the new attention learns to give what the old one gave for the same input.

The layers are independent: all see the old model's activations, so errors do
not add up over the depth, and only the attention's parameters train. The loss
of a layer is relative, ``|new - old|^2 / |old|^2`` over a batch, which weighs
layers alike for outputs of any size. After Zhang et al. 2024 ("The
Hedgehog & the Porcupine"), who match the attention's weights instead of its
outputs; a mechanism with a constant state need not have such weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from model.attention.base import Attention
from model.lm import LanguageModel
from model.training.config import TrainConfig
from model.training.errors import TrainingError
from model.training.optimizer import learning_rate_factor, make_optimizers, prepare_step


def match_layers(
    old: LanguageModel,
    new: LanguageModel,
    batches: Iterable[Tensor],
    num_steps: int,
    config: TrainConfig,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[list[float]]:
    """Trains the attention of ``new``, in place, on ``num_steps`` batches of tokens [B, T].

    Both models compute under ``autocast``. Returns the relative error of each layer at each
    step, before its update. Raises `TrainingError`, the weights untouched by that step, where
    an error or a gradient is not finite.
    """
    new.requires_grad_(False)
    layers = attentions(new)
    for layer in layers:
        layer.requires_grad_(True)
    optimizers = make_optimizers(new, config.optimizer, config.learning_rate, config.weight_decay)
    warmup_steps = min(config.warmup_steps, num_steps // 10)
    history = []
    for step, tokens in zip(range(num_steps), batches, strict=False):
        factor = learning_rate_factor(step, num_steps, warmup_steps)
        prepare_step(optimizers, factor)
        with autocast():
            pairs = zip(layers, old.attention_pairs(tokens), strict=True)
            errors = [_backward(layer, inputs, outputs) for layer, (inputs, outputs) in pairs]
        norms = [
            torch.nn.utils.clip_grad_norm_(layer.parameters(), config.clip) for layer in layers
        ]
        history.append(_finite(errors, "an error", step))
        _finite(norms, "the norm of a gradient", step)
        for optimizer in optimizers:
            optimizer.step()
    new.requires_grad_(True)
    return history


def attentions(model: LanguageModel) -> list[Attention]:
    """The attention of each layer."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def _backward(layer: Attention, inputs: Tensor, wanted: Tensor) -> Tensor:
    """Adds the gradient of the layer's loss to its parameters; the relative error."""
    losses: list[Tensor] = []
    found = layer.parallel(inputs, losses)
    found, wanted = found.float(), wanted.float()
    error = (found - wanted).square().mean() / wanted.square().mean().clamp_min(1e-12)
    loss = torch.stack([error, *losses]).sum()
    with torch.autocast(inputs.device.type, enabled=False):
        loss.backward()
    return error.detach()


def _finite(values: list[Tensor], name: str, step: int) -> list[float]:
    found: list[float] = torch.stack(values).tolist()
    if not all(map(math.isfinite, found)):
        raise TrainingError(f"{name} is not finite at step {step} of matching: {found}")
    return found
