"""GPT-2 folders against transformers' own forward pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from model.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from model.config import ConfigError
from model.state import StateLayout
from tests.model.foreign.conftest import Save, assert_same_logits, tokens


def gpt2(**changes: object) -> GPT2LMHeadModel:
    values: dict[str, object] = {
        "vocab_size": 310,
        "n_positions": 48,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 3,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return GPT2LMHeadModel(GPT2Config(**{**values, **changes})).eval()


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, rename: dict[str, str | None]) -> None:
    """Renames keys; None takes one away."""
    path = folder / "model.safetensors"
    weights = {rename.get(n, n): t.clone() for n, t in load_file(path).items()}
    weights.pop(None, None)
    save_file(weights, path)


def reshape(folder: Path, name: str, *shape: int) -> None:
    """Gives a key another shape."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), name: torch.zeros(shape)}, path)


@pytest.mark.parametrize(
    "changes",
    [{}, {"n_inner": 40}, {"tie_word_embeddings": False}, {"layer_norm_epsilon": 0.1}],
    ids=str,
)
def test_logits_equal_transformers(save: Save, changes: dict[str, object]) -> None:
    theirs = gpt2(**changes)
    assert_same_logits(save(theirs), theirs, 48)


def test_three_forms_agree_and_positions_past_the_table_stay_at_its_end(save: Save) -> None:
    model = load_checkpoint(save(gpt2(n_positions=8))).model
    ids, zero = tokens(12), torch.zeros(2, dtype=torch.int64)
    wanted = model.parallel(ids)
    first, state = model.chunk(ids[:, :7], model.empty_state(2), zero)
    rest = []
    for i in range(7, 12):
        logits, state = model.step(ids[:, i], state, zero + i)
        rest.append(logits)
    found = torch.cat([first, torch.stack(rest, dim=1)], dim=1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        model.position_embedding.weight[7, 0] += 1.0
    assert (model.parallel(ids) - wanted).abs().amax(dim=(0, 2))[7:].min() > 1e-3


def test_first_checkpoints_have_no_prefix_and_hold_masks(save: Save) -> None:
    theirs = gpt2()
    folder = save(theirs)
    path = folder / "model.safetensors"
    weights = {n.removeprefix("transformer."): t for n, t in load_file(path).items()}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 48, 48).tril() for i in range(2)}
    save_file({**weights, **masks}, path)
    assert_same_logits(folder, theirs, 20)


def test_ids_without_text_are_cut_off(save: Save) -> None:
    loaded = load_checkpoint(save(gpt2()))
    assert loaded.config.vocab_size == loaded.tokenizer.vocab_size == 300
    assert loaded.model.embedding.num_embeddings == 300


@pytest.mark.parametrize("model_type", [["gpt2"], {"gpt2": 1}, None])
def test_family_that_is_no_name_is_refused(save: Save, model_type: object) -> None:
    folder = save(gpt2())
    edit_config(folder, model_type=model_type)
    with pytest.raises(ConfigError, match="model_type"):
        load_checkpoint(folder)


@pytest.mark.parametrize("field", ["bos_token_id", "eos_token_id"])
@pytest.mark.parametrize("value", [310, -1, "0", True, 1.0, [], [[0]], [0, 310], {"a": 0}])
def test_special_id_that_is_none_is_refused_by_name(save: Save, field: str, value: object) -> None:
    folder = save(gpt2())
    edit_config(folder, **{field: value})
    with pytest.raises(ConfigError, match=rf"{field} must be in 0\.\.(299|309), or a list"):
        load_checkpoint(folder)


def test_end_of_text_without_text_is_refused(save: Save) -> None:
    folder = save(gpt2())
    edit_config(folder, eos_token_id=305)
    with pytest.raises(ConfigError, match="eos_token_id"):
        load_checkpoint(folder)


def test_weights_in_several_files_are_read_and_named_by_the_digest(save: Save) -> None:
    theirs = gpt2()
    folder = save(theirs, max_shard_size="20KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert not (folder / "model.safetensors").exists()
    loaded = assert_same_logits(folder, theirs, 20)
    weights = load_file(shards[0])
    save_file({name: tensor + 1 for name, tensor in weights.items()}, shards[0])
    assert load_checkpoint(folder).digest != loaded.digest
    shards[0].unlink()
    with pytest.raises(CheckpointError, match=shards[0].name):
        load_checkpoint(folder)


def test_index_that_leaves_the_folder_is_refused(save: Save) -> None:
    folder = save(gpt2())
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    for names, message in (({"a": "../x.safetensors"}, "outside"), ({"a": 1}, "weight_map")):
        index.write_text(json.dumps({"weight_map": names}))
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "relu"}, "activation_function 'relu'"),
        ({"scale_attn_weights": False}, "scale_attn_weights False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"n_layer": None}, "n_layer is missing"),
        ({"n_layer": "2"}, "n_layer must be a positive integer"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be a boolean"),
        ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon must be a number"),
        ({"n_head": 0}, "n_head"),
        ({"n_head": 5}, "n_head"),
        ({"sparse_attention": True}, "unknown field 'sparse_attention'"),
    ],
)
def test_config_beyond_ours_is_refused_by_name(
    save: Save, changes: dict[str, object], message: str
) -> None:
    folder = save(gpt2())
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"transformer.wpe.weight": None}, r"lack key 'wpe\.weight'"),
        ({"transformer.h.1.ln_2.bias": None}, r"lack key 'h\.1\.ln_2\.bias'"),
        ({"transformer.h.1.ln_2.bias": "transformer.h.1.ln_3.bias"}, r"h\.1\.ln_2\.bias"),
        ({"transformer.wpe.weight": "transformer.wte.weight"}, r"wpe\.weight"),
    ],
)
def test_missing_key_is_named(save: Save, rename: dict[str, str | None], message: str) -> None:
    folder = save(gpt2())
    edit_weights(folder, rename)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_unknown_key_is_named(save: Save) -> None:
    folder = save(gpt2())
    edit_config(folder, n_layer=1)
    with pytest.raises(CheckpointError, match=r"unknown key 'h\.1\.attn"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_positions": 50}, r"position_embedding\.weight is \[48, 24\]"),
        ({"vocab_size": 312}, r"embedding\.weight is \[310, 24\]"),
    ],
)
def test_misshapen_key_is_named(save: Save, changes: dict[str, object], message: str) -> None:
    folder = save(gpt2())
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize("shape", [(), (24,), (1, 24, 72)], ids=str)
def test_key_that_is_no_matrix_is_named(save: Save, shape: tuple[int, ...]) -> None:
    folder = save(gpt2())
    reshape(folder, "transformer.h.0.attn.c_attn.weight", *shape)
    with pytest.raises(CheckpointError, match=r"blocks\.0\.attention\.qkv\.weight is \["):
        load_checkpoint(folder)


def test_tied_head_that_differs_is_refused(save: Save) -> None:
    folder = save(gpt2(tie_word_embeddings=False))
    edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_checkpoint(folder)


def test_loaded_model_is_one_of_ours(save: Save, tmp_path: Path) -> None:
    loaded, ids = load_checkpoint(save(gpt2())), tokens(20)
    save_checkpoint(tmp_path / "ours", loaded.model, loaded.tokenizer)
    again = load_checkpoint(tmp_path / "ours")
    assert again.config == loaded.config
    assert torch.equal(again.model.parallel(ids), loaded.model.parallel(ids))
    with pytest.raises(ConfigError, match="no constant state"):
        StateLayout.of(loaded.config)
