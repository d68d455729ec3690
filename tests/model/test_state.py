from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from model.config import ConfigError, ModelConfig
from model.lm import LanguageModel
from model.state import ALIGNMENT, StateLayout
from model.state_tensors import state_views
from tests.tiny import tiny_checkpoint
from tests.weights import pack_state


def test_bytes_follow_from_the_config() -> None:
    gated = ModelConfig(vocab_size=4096, attention="gated", attention_options={"conv_size": 4})
    assert StateLayout.of(gated).num_bytes == 6 * (4 * 64 * 64 * 4 + 3 * 3 * 256 * 4)
    elu = ModelConfig(vocab_size=4096, attention="elu")
    assert StateLayout.of(elu).num_bytes == 6 * (4 * 64 * 64 + 4 * 64) * 8  # in float64


def test_bytes_do_not_change_with_the_text() -> None:
    model = tiny_checkpoint().model
    layout = StateLayout.of(model.config)
    blocks = torch.zeros(1, layout.num_bytes, dtype=torch.uint8)
    for position in (0, 1000):
        state = state_views(layout, blocks)
        _, state = model.chunk(
            torch.ones(1, 70, dtype=torch.int64), state, torch.tensor([position])
        )
        pack_state(layout, state, blocks)
    assert blocks.shape == (1, layout.num_bytes)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_views_share_the_block_and_do_not_overlap(kind: str) -> None:
    layout = StateLayout.of(ModelConfig(vocab_size=300, head_dim=3, num_attention_heads=3))
    blocks = np.zeros((2, layout.num_bytes), dtype=np.uint8)
    views: Any = layout.views(blocks)
    if kind == "torch":
        views = state_views(layout, torch.from_numpy(blocks))
    for number, field in enumerate(layout.fields, start=1):
        views[field.layer][field.name][1] = number
        assert field.offset % ALIGNMENT == 0
    for number, field in enumerate(layout.fields, start=1):
        assert (views[field.layer][field.name][1] == number).all()
        assert (views[field.layer][field.name][0] == 0).all()


def test_pack_is_the_inverse_of_views() -> None:
    model = tiny_checkpoint().model
    layout = StateLayout.of(model.config)
    _, state = model.chunk(
        torch.ones(2, 9, dtype=torch.int64), model.empty_state(2), torch.zeros(2, dtype=torch.int64)
    )
    blocks = torch.zeros(2, layout.num_bytes, dtype=torch.uint8)
    pack_state(layout, state, blocks)
    for wanted, found in zip(state, state_views(layout, blocks), strict=True):
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_growing_cache_has_no_layout() -> None:
    with pytest.raises(ConfigError, match="softmax"):
        StateLayout.of(ModelConfig(vocab_size=300, attention="softmax"))


def test_zeroed_block_is_the_empty_state() -> None:
    model: LanguageModel = tiny_checkpoint("elu").model
    layout = StateLayout.of(model.config)
    views = state_views(layout, torch.zeros(1, layout.num_bytes, dtype=torch.uint8))
    tokens, start = torch.arange(1, 8).unsqueeze(0), torch.zeros(1, dtype=torch.int64)
    from_block = model.chunk(tokens, views, start)[0]
    assert torch.equal(from_block, model.chunk(tokens, model.empty_state(1), start)[0])


@pytest.mark.parametrize("attention", ["gated", "vq"])
def test_numpy_and_torch_see_the_same_tensors(attention: str) -> None:
    model = tiny_checkpoint(attention).model
    layout = StateLayout.of(model.config)
    _, state = model.chunk(
        torch.ones(2, 9, dtype=torch.int64), model.empty_state(2), torch.zeros(2, dtype=torch.int64)
    )
    blocks = np.zeros((2, layout.num_bytes), dtype=np.uint8)
    pack_state(layout, state, torch.from_numpy(blocks))
    for wanted, found in zip(state, layout.views(blocks), strict=True):
        assert found.keys() == wanted.keys()
        assert all(np.array_equal(found[name], tensor) for name, tensor in wanted.items())
