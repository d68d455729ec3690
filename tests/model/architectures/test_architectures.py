"""What every architecture keeps: its config, its weights and its state say the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.architectures import ARCHITECTURES, config_class, config_from_dict
from model.architectures.network import network_class
from model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from model.config import ConfigError
from model.convert.convert import as_block
from model.families.rwkv7.config import Rwkv7Config
from model.state import StateLayout
from model.state_tensors import state_views
from model.weights import num_parameters
from server.models.backend import open_backend
from tests import tiny
from tests.tiny import tiny_checkpoint
from tests.weights import pack_state

TINY = ["gated", *tiny.ARCHITECTURES, *tiny.BOUNDED]


@pytest.fixture(params=TINY)
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return tiny_checkpoint(request.param)


def test_each_architecture_has_a_tiny_model() -> None:
    found = {tiny_checkpoint(name).config.model_type for name in TINY}
    assert found == ARCHITECTURES.keys()


def test_saved_folder_is_the_same_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint.model, checkpoint.tokenizer)
    loaded = load_checkpoint(tmp_path)
    assert loaded.config == checkpoint.config
    tokens = torch.arange(30)[None]
    assert torch.equal(loaded.model.parallel(tokens), checkpoint.model.parallel(tokens))


def test_weights_are_those_that_the_config_says(checkpoint: Checkpoint) -> None:
    model = network_class(checkpoint.config)(checkpoint.config)
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert found == checkpoint.config.weight_shapes()
    assert num_parameters(checkpoint.config) == model.num_parameters()


def test_state_is_that_of_the_layout(checkpoint: Checkpoint) -> None:
    layout, model = StateLayout.of(checkpoint.config), checkpoint.model
    empty, position = model.empty_state(3), torch.zeros(3, dtype=torch.int64)
    _, state = model.chunk(torch.arange(60).view(3, 20), empty, position)
    blocks = torch.zeros(3, layout.num_bytes, dtype=torch.uint8)
    pack_state(layout, state, blocks)
    for layer, view in zip(state, state_views(layout, blocks), strict=True):
        assert layer.keys() == view.keys()
        for name, tensor in layer.items():
            assert (view[name].dtype, view[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(view[name], tensor)


def test_published_sizes_have_their_bytes_of_state() -> None:
    """0.1B, 0.4B and 1.5B: 2.43, 6.49 and 13.0 MB."""
    sizes = [(12, 768), (24, 1024), (24, 2048)]
    configs = [Rwkv7Config(65536, width, layers) for layers, width in sizes]
    assert [round(StateLayout.of(c).num_bytes / 1e6, 2) for c in configs] == [2.43, 6.49, 12.98]


def test_unknown_model_type_is_refused_with_the_known() -> None:
    with pytest.raises(ConfigError, match=r"model_type must be 'everstream' or .*, not 'other'"):
        config_from_dict({"model_type": "other"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "vocab_size is missing"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer"),
        ({"vocab_size": 9, "head_dim": 100}, "head_dim must divide 768, not 100"),
        ({"vocab_size": 9, "gate_rank": 0}, "gate_rank must be a positive integer"),
        ({"vocab_size": 9, "norm_eps": 1.0}, r"norm_eps must be in \(0, 1\)"),
        ({"vocab_size": 9, "eos_token_id": 9}, r"eos_token_id must be in 0\.\.8"),
        ({"vocab_size": 9, "heads": 3}, "unknown field 'heads'"),
    ],
)
def test_rwkv7_config_names_the_field(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_dict({"model_type": "everstream-rwkv7", **values})


def test_only_own_blocks_are_converted() -> None:
    with pytest.raises(ConfigError, match="models of rwkv7 can be trained and served, not conv"):
        as_block(tiny_checkpoint("rwkv7"))


def test_native_runtime_takes_every_family_with_kernels(checkpoint: Checkpoint) -> None:
    native = ARCHITECTURES[checkpoint.config.model_type].native
    assert open_backend(checkpoint).name == ("torch" if native is None else "native")


def test_each_family_makes_a_model_to_train_by_its_name() -> None:
    for model_type, family in ARCHITECTURES.items():
        config = config_class(family.name).for_training(300, 7, {"num_hidden_layers": 3})
        assert config.model_type == model_type
        assert (config.vocab_size, config.num_hidden_layers) == (300, 3)
        assert (config.bos_token_id, config.eos_token_id) == (7, 7)
        assert StateLayout.of(config).num_layers == 3
    with pytest.raises(
        ConfigError, match=r"architecture must be everstream or rwkv7 or .*, not 'gru'"
    ):
        config_class("gru")


def test_initial_model_has_every_weight_and_is_nearly_uniform(checkpoint: Checkpoint) -> None:
    model = network_class(checkpoint.config)(checkpoint.config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # what init_weights forgets shows
    model.init_weights(torch.Generator().manual_seed(0))
    tokens = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(1))
    loss = torch.nn.functional.cross_entropy(
        model.parallel(tokens).flatten(0, 1), tokens.flip(0).flatten()
    )
    assert loss.item() == pytest.approx(torch.tensor(300.0).log().item(), rel=0.1)
