from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from typer.testing import CliRunner

from model.checkpoint import load_checkpoint, save_checkpoint
from model.config import ModelConfig
from model.lm import LanguageModel
from model.tokenizer import Tokenizer
from server.cli.main import app


def saved(folder: Path, config: ModelConfig, tokenizer: Tokenizer, seed: int) -> LanguageModel:
    model = LanguageModel(config)
    model.init_weights(torch.Generator().manual_seed(seed))
    save_checkpoint(folder, model, tokenizer)
    return model


def test_every_weight_is_the_mean(tmp_path: Path, tiny: ModelConfig, tokenizer: Tokenizer) -> None:
    folders = [tmp_path / str(seed) for seed in range(3)]
    models = [
        saved(folder, tiny, tokenizer, seed).state_dict() for seed, folder in enumerate(folders)
    ]
    said = CliRunner().invoke(app, ["average", *map(str, folders), str(tmp_path / "out")])
    assert said.exit_code == 0, said.output
    found = load_checkpoint(tmp_path / "out")
    assert found.config == tiny
    for name, weight in found.model.state_dict().items():
        wanted = torch.stack([model[name] for model in models]).mean(dim=0)
        torch.testing.assert_close(weight, wanted)


def test_models_of_different_shapes_are_refused(
    tmp_path: Path, tiny: ModelConfig, tokenizer: Tokenizer
) -> None:
    wider = dataclasses.replace(tiny, intermediate_size=32)
    for name, config in (("a", tiny), ("b", wider)):
        saved(tmp_path / name, config, tokenizer, 0)
    words = ["average", str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "out")]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 2
    assert "has another shape or tokenizer" in said.output
    assert not (tmp_path / "out").exists()
