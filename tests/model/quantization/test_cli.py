from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from model.checkpoint import load_checkpoint, save_checkpoint
from model.quantization.cli import register
from tests.tiny import TEXT, tiny_checkpoint

ROOT = Path(__file__).parents[3]
NAME = "model.safetensors"


@pytest.fixture
def app() -> typer.Typer:
    result = typer.Typer()
    result.callback()(lambda: None)  # one command alone would be the app itself
    register(result)
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint = tiny_checkpoint()
    save_checkpoint(tmp_path / "model", checkpoint.model, checkpoint.tokenizer)
    return tmp_path / "model"


@pytest.mark.parametrize(("dtype", "ratio"), [("int8", 0.45), ("bfloat16", 0.6)])
def test_command_says_how_many_bytes_are_left(
    app: typer.Typer, folder: Path, tmp_path: Path, dtype: str, ratio: float
) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["quantize", str(folder), str(out), "--dtype", dtype])
    assert result.exit_code == 0, result.output
    before, after = (path.joinpath(NAME).stat().st_size for path in (folder, out))
    assert after < ratio * before
    assert result.stdout == f"{out}: {after:,} bytes of weights, before {before:,}\n"
    assert load_checkpoint(out).config == load_checkpoint(folder).config


def test_evaluation_compares_the_precisions(app: typer.Typer, folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    words = ["quantize", str(folder), str(tmp_path / "out"), "--evaluate", str(text)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()[1:]]
    assert [line["dtype"] for line in lines] == ["float32", "bfloat16", "int8"]
    for line in lines:
        assert line["loss"] == pytest.approx(
            line["bits_per_byte"] - lines[0]["bits_per_byte"], abs=2e-4
        )
    assert 0 < abs(lines[2]["loss"]) < 0.1


def test_model_is_not_written_over_itself(app: typer.Typer, folder: Path) -> None:
    before = (folder / NAME).read_bytes()
    result = CliRunner().invoke(app, ["quantize", str(folder), f"{folder}/../model"])
    assert result.exit_code == 2
    assert "is the model's own folder" in result.output
    assert (folder / NAME).read_bytes() == before


def test_folder_that_is_no_model_is_one_line(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["quantize", str(tmp_path), str(tmp_path / "out")])
    assert result.exit_code == 2
    assert result.stderr == f"everstream: {tmp_path} has no config.json\n"


def test_model_that_is_not_covered_is_quantized_but_not_evaluated(
    app: typer.Typer, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("softmax")
    folder, out, text = tmp_path / "softmax", tmp_path / "out", tmp_path / "text.txt"
    save_checkpoint(folder, checkpoint.model, checkpoint.tokenizer)
    text.write_text(TEXT, encoding="utf-8")
    words = ["quantize", str(folder), str(out), "--evaluate", str(text)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert result.stderr.startswith("everstream: ")
    assert load_checkpoint(out).config == checkpoint.config


@pytest.mark.process
def test_command_needs_no_torch(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    script = (
        "import sys, pathlib; from model.quantization.cli import quantize_command as run\n"
        "model, out, text = sys.argv[1:]\n"
        "run(model, pathlib.Path(out), 'int8', pathlib.Path(text), 1)\n"
        "assert 'torch' not in sys.modules"
    )
    words = [sys.executable, "-c", script, str(folder), str(tmp_path / "out"), str(text)]
    subprocess.run(words, cwd=ROOT, check=True, timeout=60)
