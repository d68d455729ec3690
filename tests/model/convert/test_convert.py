from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from model.checkpoint import load_checkpoint
from model.convert.convert import Conversion, convert
from model.evaluation import evaluate
from model.training import TrainingError
from model.training.loop import train
from tests.model.convert.conftest import training


def test_matching_and_fine_tuning_bring_a_swapped_model_back(
    trained: Path, corpus: Path, tmp_path: Path
) -> None:
    config = training(corpus, tmp_path, eval_every=4)
    report = convert(Conversion(str(trained), "performer", {"features": 8}, 20, config))
    bits = report.bits_per_byte
    assert bits["original"] < bits["fine_tuned"] < bits["matched"] < bits["swapped"]
    assert all(last < first for first, last in report.match_error)
    tokens = [place for place, _ in report.curve]
    assert tokens == [(step * 4 * 64) for step in (0, 20, 24, 28, 30)]
    assert report.match_tokens + report.fine_tune_tokens == tokens[-1]
    converted = load_checkpoint(tmp_path / "model")
    assert converted.config.attention == "performer"
    rotation = {"rotary": "before", "rope_theta": 10_000.0}
    assert converted.config.attention_options == {**rotation, "features": 8}
    again = evaluate(converted.model, converted.tokenizer, corpus, "windows", 64)
    assert again.bits_per_byte == pytest.approx(bits["fine_tuned"], abs=1e-6)
    original = load_checkpoint(trained)
    first = evaluate(original.model, original.tokenizer, corpus, "windows", 64)
    assert first.bits_per_byte == pytest.approx(bits["original"], abs=1e-6)
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved["bits_per_byte"] == bits
    assert saved == json.loads(json.dumps(dataclasses.asdict(report)))
    assert (tmp_path / "recovery.png").stat().st_size > 1000


def test_without_matching_there_is_no_such_stage(
    trained: Path, corpus: Path, tmp_path: Path
) -> None:
    report = convert(
        Conversion(str(trained), "window_linear", {}, 0, training(corpus, tmp_path, num_steps=1))
    )
    assert report.bits_per_byte.keys() == {"original", "swapped", "fine_tuned"}
    assert report.match_error == []
    # Its window is as long as those that are scored, so the bare swap loses nothing.
    bits = report.bits_per_byte
    assert bits["swapped"] == pytest.approx(bits["original"], abs=1e-5)


def test_same_seed_gives_the_same_model(trained: Path, corpus: Path, tmp_path: Path) -> None:
    bits = [
        convert(
            Conversion(str(trained), "relu", {}, 2, training(corpus, tmp_path / name, num_steps=2))
        ).bits_per_byte
        for name in ("a", "b")
    ]
    assert bits[0] == bits[1]


def test_precision_of_the_run_is_that_of_all_stages(
    trained: Path, corpus: Path, tmp_path: Path
) -> None:
    reports = {
        precision: convert(
            Conversion(
                str(trained),
                "performer",
                {},
                1,
                training(corpus, tmp_path / precision, num_steps=1, precision=precision),
            )
        )
        for precision in ("float32", "bfloat16")
    }
    exact, rounded = (reports[name].bits_per_byte for name in ("float32", "bfloat16"))
    for stage, bits in rounded.items():
        assert bits != exact[stage]
        assert bits == pytest.approx(exact[stage], abs=0.02)
    converted = load_checkpoint(tmp_path / "bfloat16" / "model")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = evaluate(converted.model, converted.tokenizer, corpus, "windows", 64)
    assert again.bits_per_byte == pytest.approx(rounded["fine_tuned"], abs=1e-9)


def test_folder_of_a_training_run_is_not_touched(
    trained: Path, corpus: Path, tmp_path: Path
) -> None:
    config = training(corpus, tmp_path, num_steps=1)
    original = load_checkpoint(trained)
    train(config, original.config, original.tokenizer)
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    with pytest.raises(TrainingError, match="another"):
        convert(Conversion(str(trained), "elu", {}, 1, config))
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_impossible_conversion_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="match_steps"):
        Conversion("x", "elu", {}, -1, training(corpus, tmp_path))
    with pytest.raises(TrainingError, match="validation"):
        Conversion("x", "elu", {}, 1, training(corpus, tmp_path, valid=()))
