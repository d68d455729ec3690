from __future__ import annotations

from pathlib import Path

import pytest

from model.bundled_models import DEFAULT_MODEL
from tests.chosen_model import VARIABLE, bundled_model, chosen_engine, served_model
from tests.reliability.engines import BACKENDS
from tests.tiny import request, solo, tokens_of, write_model


@pytest.mark.parametrize("backend", BACKENDS)
def test_variable_names_the_model(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = write_model(tmp_path / "chosen", seed=3)
    monkeypatch.setenv(VARIABLE, str(chosen))
    assert served_model(tmp_path / "served") == bundled_model() == chosen
    assert not (tmp_path / "served").exists()
    assert len(tokens_of(solo(chosen_engine(backend), request(max_tokens=5)))) == 5


def test_without_the_variable_tests_have_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert served_model(tmp_path / "served") == tmp_path / "served"
    assert bundled_model() == DEFAULT_MODEL
