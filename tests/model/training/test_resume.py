from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model.config import ModelConfig
from model.lm import LanguageModel
from model.training.loop import load_progress, save_progress


def saved(folder: Path, step: int) -> LanguageModel:
    model = LanguageModel(ModelConfig(300, 16, 1, 2, 8, 24))
    model.init_weights(torch.Generator().manual_seed(step))
    save_progress(folder, model, [], model.empty_state(1), {"step": step})
    return model


def step_of(folder: Path) -> int:
    loaded = load_progress(folder)
    assert loaded is not None
    return int(loaded[1]["step"])


def test_nothing_saved_is_none(tmp_path: Path) -> None:
    assert load_progress(tmp_path / "progress") is None


def test_last_save_wins_and_leaves_no_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "progress"
    saved(folder, 1)
    model = saved(folder, 2)
    loaded = load_progress(folder)
    assert loaded is not None
    assert loaded[1] == {"step": 2}
    assert torch.equal(loaded[0]["model.embedding.weight"], model.embedding.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["progress"]


def test_kill_between_the_two_renames_keeps_the_older_save(tmp_path: Path) -> None:
    folder = tmp_path / "progress"
    saved(folder, 1)
    folder.rename(folder.with_suffix(".old"))
    assert step_of(folder) == 1


def test_second_kill_while_writing_keeps_the_older_save(tmp_path: Path) -> None:
    folder = tmp_path / "progress"
    model = saved(folder, 1)
    folder.rename(folder.with_suffix(".old"))
    with pytest.raises(TypeError):  # stands for a kill: the write ends half done
        save_progress(folder, model, [], model.empty_state(1), {"step": object()})
    assert step_of(folder) == 1
    saved(folder, 2)
    assert step_of(folder) == 2
