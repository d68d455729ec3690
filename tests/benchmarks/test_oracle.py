"""The comparison with transformers, on a tiny file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks import oracle
from model.hub.base import describe
from tests.adapted import NAME, write_adapter, write_base_file
from tests.hybrids import theirs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An adapter, with its base in the same folder."""
    base = write_base_file(tmp_path / "base" / "tiny.gguf", "F32")
    folder = write_adapter(tmp_path / "tiny", describe(base))
    os.link(base, folder / base.name)
    return folder


def test_both_runtimes_write_the_same_tokens(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = theirs(NAME)
    monkeypatch.setattr(oracle, "open_by_transformers", lambda file: other)
    out = tmp_path / "result.json"
    with pytest.raises(SystemExit) as ended:
        oracle.main(["--model", str(model), "--tokens", "6", "--output", str(out)])
    assert ended.value.code == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["readers"]
    assert list(rows) == ["torch", "native"]
    for row in rows.values():
        assert row["same_tokens"] == row["tokens"] == 12
        assert 0.0 < row["max_difference"] <= row["max_difference_all_ids"] < 0.05
        assert 0.0 <= row["mean_kl"] < 1e-4


def test_tokens_count_up_to_the_first_that_differs() -> None:
    even, peaked = np.log([[0.5, 0.5], [0.5, 0.5]]), np.log([[0.5, 0.5], [0.9, 0.1]])
    row = oracle.compared([([0, 0], peaked)], [([0, 1], even)])
    assert (row["same_tokens"], row["tokens"]) == (1, 2)
    assert row["max_difference"] == pytest.approx(np.log(5))
    assert row["mean_kl"] == pytest.approx((0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(5)) / 2)
