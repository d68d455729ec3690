"""Each layer of the new attention learns to give what the old one gave for the same input.

The layers are independent: all see the old model's activations, so errors do
not add up over the depth, and only the attention's parameters train. The loss
of a layer is relative, ``|new - old|^2 / |old|^2`` over a batch, which weighs
layers alike whatever the size of their outputs. After Zhang et al. 2024 ("The
Hedgehog & the Porcupine"), who match the attention's weights instead of its
outputs; a mechanism with a constant state need not have such weights.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from model.attention.base import Attention
from model.lm import LanguageModel
from model.training.loop import TrainConfig, TrainingError
from model.training.optimizer import learning_rate_factor, make_optimizers


def match_layers(
    old: LanguageModel,
    new: LanguageModel,
    batches: Iterable[Tensor],
    num_steps: int,
    config: TrainConfig,
) -> list[list[float]]:
    """Trains the attention of ``new``, in place, on ``num_steps`` batches of tokens [B, T].

    Returns the relative error of each layer at each step, before its update.
    Raises `TrainingError` where an error is not finite.
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
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * factor
        errors = []
        for layer, (inputs, outputs) in zip(layers, old.attention_pairs(tokens), strict=True):
            errors.append(_backward(layer, inputs, outputs))
            torch.nn.utils.clip_grad_norm_(layer.parameters(), config.clip)
        history.append(torch.stack(errors).tolist())
        if not torch.stack(errors).isfinite().all():
            raise TrainingError(f"an error is not finite at step {step} of matching: {history[-1]}")
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
    error = (found - wanted).square().mean() / wanted.square().mean().clamp_min(1e-12)
    torch.stack([error, *losses]).sum().backward()
    return error.detach()
