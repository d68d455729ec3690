from __future__ import annotations

import copy
import itertools
from functools import partial
from pathlib import Path

import pytest
import torch

from model.convert.convert import attentions, copy_shared, match_layers, target_config
from model.lm import LanguageModel
from model.training import TrainingError
from model.training.loop import TrainConfig
from tests.tiny import tiny_checkpoint

CONFIG = TrainConfig(data=(), out=Path(), learning_rate=1e-2, warmup_steps=2)


def swapped(attention: str, **options: object) -> tuple[LanguageModel, LanguageModel]:
    """A softmax model with weights of every kind set, and the same with another attention."""
    old = copy.deepcopy(tiny_checkpoint("softmax").model)  # which other tests share
    new = LanguageModel(target_config(old.config, attention, options))
    new.init_weights(torch.Generator().manual_seed(0))
    copy_shared(old, new)
    return old, new


def tokens(length: int = 48) -> torch.Tensor:
    return torch.randint(300, (3, length), generator=torch.Generator().manual_seed(0))


def test_pairs_are_what_the_model_computes() -> None:
    model, ids = tiny_checkpoint("softmax").model, tokens()
    x = model.embedding(ids)
    for block, (inputs, outputs) in zip(model.blocks, model.attention_pairs(ids), strict=True):
        assert torch.equal(inputs, block.attention_norm(x))
        x = block.with_mlp(x, outputs)
    assert torch.equal(model.logits(model.norm(x)), model.parallel(ids))


def test_window_as_long_as_the_text_needs_no_matching() -> None:
    old, new = swapped("window_linear", window=48)
    (errors,) = match_layers(old, new, [tokens()], 1, CONFIG)
    assert max(errors) < 1e-9


@pytest.mark.parametrize("attention", ["performer", "gated", "vq"])
def test_error_of_each_layer_falls(attention: str) -> None:
    old, new = swapped(attention)
    history = match_layers(old, new, itertools.repeat(tokens()), 40, CONFIG)
    assert len(history) == 40
    for first, last in zip(history[0], history[-1], strict=True):
        assert last < 0.7 * first


def test_only_the_attention_learns() -> None:
    old, new = swapped("performer")
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    teacher = {name: tensor.clone() for name, tensor in old.state_dict().items()}
    match_layers(old, new, itertools.repeat(tokens()), 3, CONFIG)
    changed = {n for n, tensor in new.state_dict().items() if not torch.equal(tensor, before[n])}
    assert changed == {
        f"blocks.{i}.attention.{name}.weight" for i in range(2) for name in ("qkv", "out")
    }
    assert all(torch.equal(tensor, teacher[name]) for name, tensor in old.state_dict().items())
    assert all(parameter.requires_grad for parameter in new.parameters())


def test_error_that_is_not_finite_ends_it_with_the_weights_untouched() -> None:
    old, new = swapped("performer")
    with torch.no_grad():
        new.blocks[1].attention.out.weight[0, 0] = float("inf")
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    with pytest.raises(TrainingError, match="not finite at step 0"):
        match_layers(old, new, [tokens()], 1, CONFIG)
    assert all(torch.equal(tensor, before[name]) for name, tensor in new.state_dict().items())


def test_gradient_that_is_not_finite_ends_it_with_the_weights_untouched() -> None:
    old, new = swapped("performer")
    with torch.no_grad():  # a target of almost nothing, so that a relative error has no bounds
        old.blocks[1].attention.out.weight.zero_()
        new.blocks[1].attention.out.weight.mul_(1e12)
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    with pytest.raises(TrainingError, match="gradient is not finite at step 0"):
        match_layers(old, new, [tokens()], 1, CONFIG)
    assert all(torch.equal(tensor, before[name]) for name, tensor in new.state_dict().items())


def test_both_models_compute_in_the_precision_that_is_given() -> None:
    old, new = swapped("performer")
    dtypes: list[torch.dtype] = []
    for model in (old, new):
        for layer in attentions(model):
            layer.get_submodule("qkv").register_forward_hook(
                lambda module, inputs, output: dtypes.append(output.dtype)
            )
    half = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    history = match_layers(old, new, itertools.repeat(tokens()), 20, CONFIG, half)
    assert dtypes == [torch.bfloat16] * 4 * 20
    assert all(last < first for first, last in zip(history[0], history[-1], strict=True))
    assert all(parameter.dtype == torch.float32 for parameter in new.parameters())


def test_every_layer_has_an_attention() -> None:
    assert len(attentions(tiny_checkpoint("gated").model)) == 2
