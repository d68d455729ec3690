"""The comparison with transformers and llama.cpp, on a tiny file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks import oracle
from benchmarks.oracle import Written
from model.checkpoint import Checkpoint, load_checkpoint
from model.hub.base import base_of, describe
from tests.adapted import NAME, write_adapter, write_base_file
from tests.hybrids import theirs

#: After which the model of `model` writes whole characters, as llama.cpp wants them.
CHARACTERS = [23, 24, 25]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An adapter, with its base in the same folder."""
    base = write_base_file(tmp_path / "base" / "tiny.gguf", "F32")
    folder = write_adapter(tmp_path / "tiny", describe(base))
    os.link(base, folder / base.name)
    return folder


def test_llama_cpp_writes_the_same(model: Path) -> None:
    checkpoint, count = load_checkpoint(base_of(model)), 6
    wanted = oracle.by_llama_cpp(checkpoint, [CHARACTERS], count)
    row = oracle.compared([oracle.greedy(oracle.on_torch(checkpoint), CHARACTERS, count)], wanted)
    assert row["same_tokens"] == count
    assert 0.0 < row["max_difference_all_ids"] < 0.05
    assert row["mean_kl"] is None


def listed_by_torch(checkpoint: Checkpoint, prompts: list[list[int]], count: int) -> list[Written]:
    """In place of llama.cpp, which lists nothing where a token is no whole character."""
    written = [oracle.greedy(oracle.on_torch(checkpoint), prompt, count) for prompt in prompts]
    for tokens, rows in written:
        said = rows[range(count), tokens].copy()
        rows[:] = np.nan
        rows[range(count), tokens] = said
    return written


def test_both_runtimes_write_the_same_tokens(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = theirs(NAME)
    monkeypatch.setattr(oracle, "open_by_transformers", lambda file: other)
    monkeypatch.setattr(oracle, "by_llama_cpp", listed_by_torch)
    out = tmp_path / "result.json"
    with pytest.raises(SystemExit) as ended:
        oracle.main(["--model", str(model), "--tokens", "6", "--output", str(out)])
    assert ended.value.code == 0
    peers = json.loads(out.read_text(encoding="utf-8"))["peers"]
    assert [name.split()[0] for name in peers] == ["transformers", "llama.cpp"]
    for peer, rows in peers.items():
        assert list(rows) == ["torch", "native"]
        for row in rows.values():
            assert row["same_tokens"] == row["tokens"] == 12
            assert 0.0 <= row["max_difference"] <= row["max_difference_all_ids"] < 0.05
            assert (row["mean_kl"] is None) == ("llama.cpp" in peer)
            assert not row["mean_kl"] or 0.0 <= row["mean_kl"] < 1e-4


def test_ids_that_a_peer_does_not_list_are_not_compared() -> None:
    listed = np.array([[np.log(0.5), np.nan], [np.log(0.5), np.nan]])
    row = oracle.compared([([0, 0], np.log([[0.5, 0.5], [0.9, 0.1]]))], [([0, 0], listed)])
    assert row["same_tokens"] == 2
    assert row["max_difference_all_ids"] == pytest.approx(np.log(0.9 / 0.5))
    assert row["mean_kl"] is None


def test_tokens_count_up_to_the_first_that_differs() -> None:
    even, peaked = np.log([[0.5, 0.5], [0.5, 0.5]]), np.log([[0.5, 0.5], [0.9, 0.1]])
    row = oracle.compared([([0, 0], peaked)], [([0, 1], even)])
    assert (row["same_tokens"], row["tokens"]) == (1, 2)
    assert row["max_difference"] == pytest.approx(np.log(5))
    assert row["mean_kl"] == pytest.approx((0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(5)) / 2)
