"""Adapters over a base: the weights are those that are merged by hand, and mistakes are named."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file

from model.architectures.network import model_of
from model.checkpoint import CheckpointError, load_checkpoint, load_tokenizer
from model.checkpoint_files import ADAPTER
from model.files import ConfigError
from model.hub.base import describe
from model.native.runtime import Runtime
from model.state import StateLayout
from model.weights import StoredWeights
from tests.adapted import SCALE, TEMPLATE, Updates, tiny_updates, write_adapter, write_base_file
from tests.model.commands import everstream, refused

#: The weights whose updates share an A, and where each one's rows of B begin.
WIDTH = 96
ROWS = {
    "mixer.qkv": {"mixer.q": 6 * 32, "mixer.k": 3 * 32, "mixer.v": 3 * 32},
    "mixer.out": {"mixer.out": WIDTH},
    "mlp.gate_up": {"mlp.gate": 96, "mlp.up": 96},
    "mlp.down": {"mlp.down": WIDTH},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base_file(tmp_path_factory.mktemp("base") / "tiny.gguf")


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    """The model, with its base next to it."""
    return next_to(base, write_adapter(tmp_path / "model", describe(base)))


def next_to(base: Path, folder: Path) -> Path:
    os.link(base, folder / base.name)
    return folder


def merged_by_hand(base: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The weights of the model, each computed on its own in float64."""
    weights = {name: np.array(array) for name, array in load_checkpoint(base).weights.items()}
    updates = tiny_updates()
    for kind, parts in ROWS.items():
        a, b = updates[f"blocks.0.{kind}.a"], updates[f"blocks.0.{kind}.b"]
        whole = SCALE * b.astype(np.float64) @ a.astype(np.float64)
        assert len(whole) == sum(parts.values())
        first = 0
        for name, rows in parts.items():
            weights[f"blocks.0.{name}.weight"] = (
                weights[f"blocks.0.{name}.weight"] + whole[first : first + rows]
            ).astype(np.float32)
            first += rows
    weights["norm.weight"] = updates["norm.weight"]
    return weights


def test_logits_are_those_of_weights_merged_by_hand(base: Path, folder: Path) -> None:
    model, by_hand = load_checkpoint(folder), merged_by_hand(base)
    assert model.weights.keys() == by_hand.keys()
    other = model_of(model.config, by_hand)
    ids = torch.tensor([[5, 300, 7, 9, 250, 3, 3, 8]])
    with torch.no_grad():
        logits, expected = model.model.parallel(ids), other.parallel(ids)
        plain = load_checkpoint(base).model.parallel(ids)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert (plain - expected).abs().max() > 0.1


def test_native_runtime_has_the_same_probabilities(base: Path, folder: Path) -> None:
    model, by_hand = load_checkpoint(folder), merged_by_hand(base)
    scores = []
    for weights in (model.weights, by_hand):
        runtime = Runtime(model.config, weights, "float32")
        pool = np.zeros((1, StateLayout.of(model.config).num_bytes), np.uint8)
        scores.append(runtime.score(pool, 0, 0, [5, 300, 7, 9, 250, 3]))
    np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=1e-5)


def test_blocks_without_an_update_are_those_of_the_base(base: Path, folder: Path) -> None:
    weights, plain = load_checkpoint(folder).weights, load_checkpoint(base).weights
    assert isinstance(weights, StoredWeights)
    assert isinstance(plain, StoredWeights)
    same, changed = "blocks.1.mlp.down.weight", "blocks.0.mlp.down.weight"
    assert plain.block_kind(changed) == weights.block_kind(same) == "Q4_1"
    assert weights.block_kind(changed) is None
    np.testing.assert_array_equal(weights.blocks(same, 3, 9), plain.blocks(same, 3, 9))
    np.testing.assert_array_equal(weights.rows(changed, 3, 9), weights[changed][3:9])


def test_config_is_the_folders_and_texts_are_the_bases(base: Path, folder: Path) -> None:
    model, plain = load_checkpoint(folder), load_checkpoint(base)
    assert (model.config.max_context, plain.config.max_context) == (320, 2048)
    assert model.chat_template.source == TEMPLATE
    assert model.tokenizer.decode([7, 8]) == plain.tokenizer.decode([7, 8])
    assert load_tokenizer(folder).decode([7, 8]) == plain.tokenizer.decode([7, 8])


def test_digest_is_of_config_adapter_and_base(base: Path, tmp_path: Path) -> None:
    updates = tiny_updates()
    other = updates | {"norm.weight": updates["norm.weight"] + 1}
    second = write_base_file(tmp_path / "other" / "tiny.gguf")
    with second.open("r+b") as file:  # the last number of a norm
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\x40")
    folders = [
        next_to(base, write_adapter(tmp_path / "one", describe(base))),
        next_to(base, write_adapter(tmp_path / "config", describe(base), context=256)),
        next_to(base, write_adapter(tmp_path / "adapter", describe(base), other)),
        next_to(second, write_adapter(tmp_path / "base", describe(second))),
    ]
    assert len({load_checkpoint(folder).digest for folder in folders}) == 4
    again = next_to(base, write_adapter(tmp_path / "again", describe(base)))
    assert load_checkpoint(again).digest == load_checkpoint(folders[0]).digest


def without(name: str) -> Updates:
    return {key: array for key, array in tiny_updates().items() if key != name}


def changed(**arrays: npt.NDArray[np.float32]) -> Updates:
    return tiny_updates() | {name.replace("__", "."): array for name, array in arrays.items()}


def zeros(*shape: int) -> npt.NDArray[np.float32]:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        (changed(blocks__0__mixer__far=zeros(2)), "unknown key 'blocks.0.mixer.far'"),
        (changed(blocks__9__mlp__down__a=zeros(3, 96)), "unknown key 'blocks.9.mlp.down.a'"),
        (changed(blocks__00__mlp__down__a=zeros(3, 96)), "unknown key 'blocks.00.mlp.down.a'"),
        (changed(blocks__0__mlp__down__c=zeros(3, 96)), "unknown key 'blocks.0.mlp.down.c'"),
        (changed(blocks__0__mixer__q__a=zeros(3, 96)), "unknown key 'blocks.0.mixer.q.a'"),
        (without("blocks.0.mlp.down.a"), "'blocks.0.mlp.down.b' and lacks 'blocks.0.mlp.down.a'"),
        (without("blocks.0.mixer.qkv.b"), "lacks 'blocks.0.mixer.qkv.b'"),
        (changed(blocks__0__mlp__down__a=zeros(3, 95)), r"mlp.down.a is \[3, 95\], wanted \[3, 96"),
        (changed(blocks__0__mlp__down__a=zeros(0, 96)), r"wanted \[1, 96\]"),
        (changed(blocks__0__mlp__down__a=zeros(96)), r"mlp.down.a is \[96\], wanted"),
        (changed(blocks__0__mixer__qkv__b=zeros(383, 3)), r"\[383, 3\], wanted \[384, 3\]"),
        (
            changed(blocks__0__mlp__down__b=np.zeros((96, 3), np.int32)),  # type: ignore[arg-type]
            "mlp.down.b is of integers",
        ),
        (changed(norm__weight=zeros(95)), r"norm.weight is \[95\], wanted \[96\]"),
        (
            changed(blocks__0__mixer__v__weight=zeros(96, 96)),
            "'blocks.0.mixer.qkv.a' and the whole of 'blocks.0.mixer.v.weight'",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    base: Path, tmp_path: Path, updates: Updates, message: str
) -> None:
    folder = next_to(base, write_adapter(tmp_path / "model", describe(base), updates))
    with pytest.raises(CheckpointError, match=f"{ADAPTER}.*{message}"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [({}, "no scale in its metadata"), ({"scale": "two"}, "'two'"), ({"scale": "inf"}, "'inf'")],
)
def test_scale_must_be_stated(
    base: Path, tmp_path: Path, metadata: dict[str, str], message: str
) -> None:
    folder = next_to(base, write_adapter(tmp_path / "model", describe(base), metadata=metadata))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_base_of_other_sizes_is_refused(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "model", describe(base), {}, num_hidden_layers=5)
    with pytest.raises(CheckpointError, match=rf"{ADAPTER} over tiny.gguf lacks key 'blocks\.4"):
        load_checkpoint(next_to(base, folder))


def test_folder_without_adapter_or_config_is_refused(folder: Path) -> None:
    (folder / ADAPTER).unlink()
    with pytest.raises(CheckpointError, match=f"model has no {ADAPTER}"):
        load_checkpoint(folder)


def test_config_of_the_base_is_not_one_of_ours(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "model", describe(base), model_type="llama")
    with pytest.raises(ConfigError, match=r"config\.json: model_type"):
        load_checkpoint(next_to(base, folder))


def test_merged_weights_are_written_by_quantize_and_export(
    base: Path, folder: Path, tmp_path: Path
) -> None:
    by_hand = merged_by_hand(base)
    everstream("quantize", folder, tmp_path / "quantized", "--dtype", "bfloat16")
    everstream("export", folder, tmp_path / "exported", "--dtype", "float32")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == by_hand.keys()
    for name, weight in by_hand.items():
        np.testing.assert_allclose(exported[name], weight, rtol=0, atol=1e-6)
    quantized = load_checkpoint(tmp_path / "quantized")
    for name, weight in by_hand.items():
        np.testing.assert_allclose(quantized.weights[name], weight, rtol=2**-8, atol=0)
    assert quantized.config == load_checkpoint(folder).config
    assert quantized.chat_template.source == TEMPLATE


def test_commands_take_the_model(folder: Path, base: Path) -> None:
    shown = everstream("inspect", folder)
    size = base.stat().st_size + (folder / ADAPTER).stat().st_size
    assert f"Q4_1, {size:,} bytes" in shown
    said = everstream("generate", "Once upon", "--model", folder, "--max-tokens", 4, "--seed", 1)
    assert said
    (folder / base.name).unlink()
    message = refused("inspect", folder)
    assert message.endswith(
        f"the base tiny.gguf is not on disk; run: everstream pull {folder} --from tiny.gguf"
    )
