"""The bundled models: each loads by its name, and no folder is larger than it may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.bundled_models import DEFAULT_NAME, bundled_models
from model.checkpoint import CheckpointError, load_checkpoint, locate
from model.weights.folder import read_weights, weight_files
from tests.tiny import write_model

#: Bytes of a folder: the default's, and each other's.
MAX_DEFAULT_BYTES, MAX_OTHER_BYTES = 12_000_000, 1_500_000


def test_default_is_the_first() -> None:
    assert next(iter(bundled_models())) == DEFAULT_NAME


@pytest.mark.parametrize("name", bundled_models())
def test_bundled_model_loads_by_its_name(name: str) -> None:
    by_name, by_folder = load_checkpoint(name), load_checkpoint(bundled_models()[name])
    assert by_name.digest == by_folder.digest
    assert by_name.config == by_folder.config


@pytest.mark.parametrize("name", bundled_models())
def test_bundled_model_fits_the_repository(name: str) -> None:
    limit = MAX_DEFAULT_BYTES if name == DEFAULT_NAME else MAX_OTHER_BYTES
    folder = bundled_models()[name]
    assert sum(file.stat().st_size for file in folder.glob("*.[js]*")) <= limit
    assert len(read_weights(folder)) > 0
    assert weight_files(folder) == [folder / "model.safetensors"]


def test_folder_of_the_same_name_is_taken_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate(DEFAULT_NAME) == bundled_models()[DEFAULT_NAME]
    Path(DEFAULT_NAME).mkdir()
    with pytest.raises(CheckpointError, match=f"{DEFAULT_NAME} has no config.json"):
        locate(DEFAULT_NAME)
    write_model(Path(DEFAULT_NAME))
    assert locate(DEFAULT_NAME) == Path(DEFAULT_NAME)


def test_name_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(CheckpointError, match=f"no such folder.*{DEFAULT_NAME}"):
        locate("everstream-none")
