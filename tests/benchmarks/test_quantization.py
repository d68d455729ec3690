"""What the table of precisions is made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.studies.quantization.__main__ import WINDOW, main, make_job, with_losses
from model.evaluation import evaluate_native
from model.native.runtime import Runtime
from tests.tiny import TEXT, tiny_checkpoint, tiny_tokenizer, write_model


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 40, encoding="utf-8")
    return path


def test_windows_are_those_of_the_evaluation(text: Path) -> None:
    job = make_job(tiny_tokenizer(), text, 5000, 1)
    checkpoint = tiny_checkpoint()
    runtime = Runtime(checkpoint.config, checkpoint.weights, "float32")
    whole = evaluate_native(runtime, tiny_tokenizer(), text, max_bytes=5000)
    assert job.num_bytes == whole.num_bytes
    assert sum(len(ids) - 1 for ids in job.texts) == whole.num_tokens
    assert max(map(len, job.texts)) == WINDOW + 1


def test_losses_are_relative_to_the_first_form() -> None:
    rows = with_losses({"a": {"bits_per_byte": 1.0}, "b": {"bits_per_byte": 1.5, "bytes": 3}})
    assert [row["loss"] for row in rows.values()] == [0.0, 0.5]
    assert rows["b"]["bytes"] == 3


def test_command_measures_every_form(text: Path, tmp_path: Path) -> None:
    model, out = write_model(tmp_path / "model"), tmp_path / "result.json"
    words = [f"tiny={model}", "--calibration", str(text), "--text", str(text)]
    main([*words, "--max-bytes", "300", "--output", str(out)])
    forms = json.loads(out.read_text())["models"]["tiny"]["forms"]
    assert list(forms) == ["float32", "bfloat16", "int8", "int4", "int4, calibrated"]
    assert forms["int4"]["bytes"] == forms["int4, calibrated"]["bytes"] < forms["bfloat16"]["bytes"]
