"""The bundled models: each loads by its name, and no folder is larger than it may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.architectures import config_from_dict
from model.bundled_models import DEFAULT_NAME, bundled_models
from model.checkpoint import CheckpointError, load_checkpoint, locate
from model.checkpoint_files import ADAPTER, CONFIG, read_weights, weight_files
from model.files import read_json
from model.hub.base import has_base, read_base, whole_models
from model.weights.safetensors import WeightFiles
from tests.tiny import write_model

#: Bytes of a folder: of a whole model, and of an adapter.
MAX_WHOLE_BYTES, MAX_ADAPTER_BYTES = 12_000_000, 6_000_000


def test_default_is_the_first() -> None:
    assert next(iter(bundled_models())) == DEFAULT_NAME


@pytest.mark.parametrize("name", whole_models())
def test_bundled_model_loads_by_its_name(name: str) -> None:
    by_name, by_folder = load_checkpoint(name), load_checkpoint(bundled_models()[name])
    assert by_name.digest == by_folder.digest
    assert by_name.config == by_folder.config


@pytest.mark.parametrize("name", bundled_models())
def test_bundled_model_fits_the_repository(name: str) -> None:
    folder = bundled_models()[name]
    limit = MAX_ADAPTER_BYTES if has_base(folder) else MAX_WHOLE_BYTES
    assert sum(file.stat().st_size for file in folder.glob("*.[js]*")) <= limit


@pytest.mark.parametrize("name", whole_models())
def test_bundled_model_is_one_file(name: str) -> None:
    folder = bundled_models()[name]
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


def test_bundled_adapter_is_over_a_base_of_the_package_index() -> None:
    """Its base is not on disk where tests run; what it must be is."""
    for name in bundled_models().keys() - whole_models().keys():
        folder = bundled_models()[name]
        base = read_base(folder)
        assert base.package is not None
        assert config_from_dict(read_json(folder / CONFIG)).vocab_size > 0
        assert len(WeightFiles([folder / ADAPTER])) > 0
        with pytest.raises(CheckpointError, match=rf"{base.file} .*; run: everstream pull {name}$"):
            load_checkpoint(name)
