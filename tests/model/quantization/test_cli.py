from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from model.checkpoint import load_checkpoint, save_checkpoint
from server.cli.main import app
from tests.model.commands import everstream, refused
from tests.tiny import TEXT, tiny_checkpoint, write_model

ROOT = Path(__file__).parents[3]
NAME = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.mark.parametrize(("dtype", "ratio"), [("int4", 0.4), ("int8", 0.45), ("bfloat16", 0.6)])
def test_command_prints_the_remaining_bytes(
    folder: Path, tmp_path: Path, dtype: str, ratio: float
) -> None:
    out = tmp_path / "out"
    said = everstream("quantize", folder, out, "--dtype", dtype)
    before, after = (path.joinpath(NAME).stat().st_size for path in (folder, out))
    assert after < ratio * before
    assert said == f"{out}: {after:,} bytes of weights, before {before:,}\n"
    assert load_checkpoint(out).config == load_checkpoint(folder).config


def test_evaluation_compares_the_precisions(folder: Path, text: Path, tmp_path: Path) -> None:
    said = everstream("quantize", folder, tmp_path / "out", "--evaluate", text)
    lines = [json.loads(line) for line in said.splitlines()[1:]]
    assert [line["dtype"] for line in lines] == ["float32", "bfloat16", "int8", "int4"]
    for line in lines:
        assert line["loss"] == pytest.approx(
            line["bits_per_byte"] - lines[0]["bits_per_byte"], abs=2e-4
        )
    for line in lines[2:]:
        assert 0 < abs(line["loss"]) < 0.1


def test_evaluation_has_a_line_of_the_calibrated_weights(folder: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "long.txt", tmp_path / "out"
    text.write_text(TEXT * 40, encoding="utf-8")
    options = ("--dtype", "int4", "--calibration", text, "--evaluate", text)
    lines = everstream("quantize", folder, out, *options).splitlines()[1:]
    rounded, calibrated = map(json.loads, lines[-2:])
    assert "calibration" not in rounded
    assert (calibrated["dtype"], calibrated["calibration"]) == ("int4", "long.txt")
    assert calibrated["bits_per_byte"] != rounded["bits_per_byte"]
    assert "int4, calibrated with long.txt, " in everstream("inspect", out)


def test_calibration_of_other_precisions_is_refused(folder: Path, text: Path) -> None:
    words = ("quantize", str(folder), str(folder / "out"), "--calibration", str(text))
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "is for --dtype int4" in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"Once", "has 3 tokens, too few"), (b"\xff\xfe" * 9, "is not a text in UTF-8")],
)
def test_calibration_without_a_text_is_one_line(
    folder: Path, content: bytes, message: str, tmp_path: Path
) -> None:
    text, out = tmp_path / "bad.txt", tmp_path / "out"
    text.write_bytes(content)
    said = refused("quantize", folder, out, "--dtype", "int4", "--calibration", text)
    assert said.startswith(f"{text} {message}")
    assert not out.exists()


def test_output_equal_to_the_input_folder_is_refused(folder: Path) -> None:
    before = (folder / NAME).read_bytes()
    assert "is the model's own folder" in refused("quantize", folder, f"{folder}/../model")
    assert (folder / NAME).read_bytes() == before


def test_folder_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    said = refused("quantize", tmp_path, tmp_path / "out")
    assert said == f"{tmp_path} has no config.json"


def test_model_that_is_not_covered_is_quantized_but_not_evaluated(
    text: Path, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("softmax")
    folder, out = tmp_path / "softmax", tmp_path / "out"
    save_checkpoint(folder, checkpoint.model, checkpoint.tokenizer)
    assert "softmax" in refused("quantize", folder, out, "--evaluate", text)
    assert load_checkpoint(out).config == checkpoint.config


@pytest.mark.process
def test_command_needs_no_torch(folder: Path, text: Path, tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from model.quantization.cli import quantize_command as run\n"
        "model, out, text = sys.argv[1:]\n"
        "run(model, pathlib.Path(out), 'int8', None, pathlib.Path(text), 1)\n"
        "assert 'torch' not in sys.modules"
    )
    words = [sys.executable, "-c", script, str(folder), str(tmp_path / "out"), str(text)]
    subprocess.run(words, cwd=ROOT, check=True, timeout=240)
