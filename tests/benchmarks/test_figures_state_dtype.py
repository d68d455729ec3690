"""The study of sums in bfloat16: what it asks for, and what its file has."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.report import read_result
from benchmarks.studies import state_dtype
from tests.requirements import needs_native
from tests.tiny import TEXT, write_model


def test_every_mechanism_and_family_with_sums_is_a_subject() -> None:
    names = state_dtype.subjects()
    assert {"elu", "gated", "delta", "vq", "cosformer", *state_dtype.FAMILIES} <= set(names)
    for name in names:
        assert state_dtype.is_measured(state_dtype.config_of_subject(name, 200)), name


def test_recall_asks_for_the_values_of_all_keys() -> None:
    tokens, targets = state_dtype.recall_batches(1)
    num_pairs = state_dtype.NUM_PAIRS[1]
    assert tokens.shape == targets.shape == (state_dtype.PAIRS_PER_STEP // num_pairs, 3 * num_pairs)
    assert (targets[:, :-num_pairs] == -100).all()
    for text, answers in zip(tokens.tolist(), targets.tolist(), strict=True):
        values = dict(zip(text[0 : 2 * num_pairs : 2], text[1 : 2 * num_pairs : 2], strict=True))
        assert [values[key] for key in text[-num_pairs:]] == answers[-num_pairs:]


def test_layer_is_read_with_both_roundings() -> None:
    errors = state_dtype.compare_roundings("elu", [100, 200])
    assert errors.keys() == {"nearest", "at_random"}
    assert errors["nearest"].keys() == errors["at_random"].keys() == {"100", "200"}
    assert all(error > 1e-4 for by_stop in errors.values() for error in by_stop.values())


@needs_native
@pytest.mark.slow
def test_figures_are_written(tmp_path: Path) -> None:
    text, model, out = tmp_path / "text.txt", write_model(tmp_path / "model"), tmp_path / "out"
    text.write_text(TEXT * 4)
    flags = ["--data", text, "--valid", text, "--tokens", 200, "--steps", 2, "--recall-steps", 2]
    flags += ["--rounding-stops", "--only", "gated", "--models", model, "--output", out]
    assert state_dtype.main([*map(str, flags)]) == 0
    gated, tiny = read_result(out)["subjects"].values()
    assert gated["tokens"] == 200
    assert gated["state_bytes"]["bfloat16"] < gated["state_bytes"]["float32"]
    wide, narrow = gated["bits_per_byte"].values()
    assert narrow == pytest.approx(wide, rel=0.01)
    assert gated["drift"]["last"] > 0
    assert gated["recall"].keys() == {"float32", "bfloat16"}
    assert "recall" not in tiny
