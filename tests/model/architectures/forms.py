"""The three forms of a network on random texts, and what is asked of them in every family."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from model.architectures.network import ModelState, Network
from tests.model.attention.test_contract import assert_close

Outputs = tuple[Tensor, ModelState]


def random_texts(vocab_size: int, length: int) -> Tensor:
    """Two of them, [2, length]."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(vocab_size, (2, length), generator=generator)


def parallel(model: Network, tokens: Tensor) -> Outputs:
    """Logits [B, T, vocabulary]; this form has no state."""
    return model.parallel(tokens), ()


def chunk(
    model: Network, tokens: Tensor, sizes: list[int] | None = None, state: ModelState | None = None
) -> Outputs:
    """Logits and the state of texts that are cut into parts of ``sizes``."""
    state = model.exact_state(len(tokens)) if state is None else state
    outputs, seen = [], 0
    for part in tokens.split(sizes or [tokens.shape[1]], dim=1):
        logits, state = model.chunk(part, state, torch.full((len(tokens),), seen))
        outputs.append(logits)
        seen += part.shape[1]
    return torch.cat(outputs, dim=1), state


def steps(model: Network, tokens: Tensor) -> Outputs:
    """The same, token by token."""
    state, outputs = model.exact_state(len(tokens)), []
    for seen, token in enumerate(tokens.unbind(1)):
        logits, state = model.step(token, state, torch.full((len(tokens),), seen))
        outputs.append(logits)
    return torch.stack(outputs, dim=1), state


def assert_gradients_agree(model: Network, tokens: Tensor, tolerance: float) -> None:
    """Every weight has a gradient, and the same by chunks and by steps."""
    found: list[dict[str, Tensor]] = []
    for form in (chunk, steps):
        trained = copy.deepcopy(model).requires_grad_()
        with torch.enable_grad():
            form(trained, tokens)[0].square().mean().backward()
        found.append({n: p.grad for n, p in trained.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() == dict(model.named_parameters()).keys()
    for parameter, gradient in found[0].items():
        assert_close(gradient, found[1][parameter].double(), tolerance)


def assert_bfloat16_is_near(model: Network, tokens: Tensor, tolerance: float) -> None:
    """Relative error of the logits with weights in bfloat16; the state stays float32."""
    low = copy.deepcopy(model).bfloat16()
    wanted, _ = chunk(model, tokens)
    for form in (chunk, steps):
        logits, state = form(low, tokens)
        assert logits.dtype == torch.bfloat16
        assert all(tensor.dtype == torch.float32 for layer in state for tensor in layer.values())
        error = (logits.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        assert error < tolerance
