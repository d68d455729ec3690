from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import CheckpointError, load_checkpoint, load_tokenizer, save_checkpoint
from model.config import ConfigError, ModelConfig
from tests.tiny import tiny_checkpoint, write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path)


def test_round_trip_is_exact(folder: Path) -> None:
    loaded = load_checkpoint(folder)
    ids = torch.arange(20).unsqueeze(0)
    assert torch.equal(loaded.model.parallel(ids), tiny_checkpoint().model.parallel(ids))
    assert not loaded.model.training
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


@pytest.mark.parametrize("suffix", [".pth", ".st", ".gguf"])
def test_folder_may_be_named_like_a_file(folder: Path, suffix: str) -> None:
    named = folder.rename(folder.with_name(f"model{suffix}"))
    assert load_checkpoint(named).config == tiny_checkpoint().config
    assert load_tokenizer(named).vocab_size == tiny_checkpoint().tokenizer.vocab_size


def test_weights_can_be_stored_and_loaded_in_16_bits(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    save_checkpoint(tmp_path, checkpoint.model, checkpoint.tokenizer, torch.bfloat16)
    assert load_file(tmp_path / "model.safetensors")["norm.weight"].dtype == torch.bfloat16
    loaded = load_checkpoint(tmp_path)
    assert loaded.model.norm.weight.dtype == torch.float32
    wanted = {n: t.bfloat16().float() for n, t in checkpoint.model.state_dict().items()}
    assert all(torch.equal(t, wanted[n]) for n, t in loaded.model.state_dict().items())


def test_digest_names_config_weights_and_tokenizer(folder: Path) -> None:
    digest = load_checkpoint(folder).digest
    assert digest == load_checkpoint(folder).digest
    weights = load_file(folder / "model.safetensors")
    weights["norm.weight"][0] += 1
    save_file(weights, folder / "model.safetensors")
    assert load_checkpoint(folder).digest != digest


def test_missing_unknown_and_misshapen_keys_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    norm = weights.pop("norm.weight")
    save_file(weights, path)
    with pytest.raises(CheckpointError, match=r"lacks key 'norm\.weight'"):
        load_checkpoint(folder)
    save_file({**weights, "norm.weight": norm, "extra": norm.clone()}, path)
    with pytest.raises(CheckpointError, match="unknown key 'extra'"):
        load_checkpoint(folder)
    save_file({**weights, "norm.weight": norm[:-1].clone()}, path)
    with pytest.raises(CheckpointError, match=r"norm\.weight is \[31\], wanted \[32\]"):
        load_checkpoint(folder)


def test_damaged_weights_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="safetensors"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(folder)


def test_vocabulary_must_hold_the_tokenizer(folder: Path) -> None:
    config = ModelConfig.load(folder / "config.json")
    ModelConfig(vocab_size=config.vocab_size - 1).save(folder / "config.json")
    with pytest.raises(CheckpointError, match="vocab_size"):
        load_checkpoint(folder)


def test_foreign_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="llama"):
        load_checkpoint(folder)


def load_from_hub(cache: Path, source: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since the hub's library reads its settings when imported."""
    code = (
        f"from model.checkpoint import load_checkpoint; print(load_checkpoint({source!r}).digest)"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.process
def test_hub_id_is_loaded_through_the_hubs_cache(tmp_path: Path) -> None:
    repository = tmp_path / "models--somebody--stories"
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = repository / "snapshots" / revision
    save_checkpoint(snapshot, tiny_checkpoint().model, tiny_checkpoint().tokenizer)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    loaded = load_from_hub(tmp_path, "somebody/stories")
    assert loaded.stdout.strip() == load_checkpoint(snapshot).digest, loaded.stderr


@pytest.mark.process
def test_hub_that_cannot_be_reached_is_a_checkpoint_error(tmp_path: Path) -> None:
    loaded = load_from_hub(tmp_path, "somebody/unknown")
    assert loaded.returncode == 1
    assert "CheckpointError: somebody/unknown is not available from the hub" in loaded.stderr


def test_path_that_is_no_folder_is_refused_without_the_hub() -> None:
    for source in ("nowhere", "./a/b", "/nowhere/at", "a/b/c"):
        with pytest.raises(CheckpointError, match="no such folder"):
            load_checkpoint(source)
