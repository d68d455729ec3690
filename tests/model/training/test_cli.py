from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from model.checkpoint import save_checkpoint
from model.training.cli import register
from server.cli.main import app as everstream
from tests.tiny import TEXT, tiny_checkpoint

TINY = "--hidden-size 16 --layers 1 --heads 2 --head-dim 8 --intermediate-size 24"
RUN = "--steps 3 --batch-size 2 --window 32 --threads 1 --vocab-size 280"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def app() -> typer.Typer:
    result = typer.Typer()
    register(result)
    return result


def train(out: Path, corpus: Path, *more: str) -> list[str]:
    return ["train", "--data", str(corpus), "--out", str(out), *TINY.split(), *RUN.split(), *more]


@pytest.mark.slow
def test_train_then_eval(app: typer.Typer, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    trained = CliRunner().invoke(app, train(out, corpus, "--valid", str(corpus)))
    assert trained.exit_code == 0, trained.output
    for mode in ("windows", "stream", "sliding"):
        options = ["--data", str(corpus), "--mode", mode, "--window", "32"]
        result = CliRunner().invoke(app, ["eval", str(out / "model"), *options])
        assert result.exit_code == 0, result.output
        values = json.loads(result.stdout)
        assert values["mode"] == mode
        assert 0 < values["bits_per_byte"] < 9


def test_second_run_starts_from_the_first_and_ends_on_another_mix(
    app: typer.Typer, corpus: Path, tmp_path: Path
) -> None:
    first, last, other = tmp_path / "first", tmp_path / "last", tmp_path / "other.txt"
    other.write_text(corpus.read_text(encoding="utf-8").replace("fox", "hen"), encoding="utf-8")
    result = CliRunner().invoke(app, train(first, corpus))
    assert result.exit_code == 0, result.output
    options = ["--data", f"{corpus}:2", "--data", str(other), "--final-data", f"{other}:3"]
    valid = ["--valid", str(corpus), "--valid", str(other), "--eval-every", "3"]
    command = ["train", *options, *valid, "--init-from", str(first / "model"), "--out", str(last)]
    result = CliRunner().invoke(app, [*command, *RUN.split()])
    assert result.exit_code == 0, result.output
    rows = (last / "log.csv").read_text(encoding="utf-8").splitlines()
    assert rows[0].split(",")[-2:] == ["corpus.txt", "other.txt"]
    assert all(0 < float(bits) < 9 for bits in rows[-1].split(",")[-2:])
    config = (first / "model" / "config.json").read_text(encoding="utf-8")
    assert (last / "model" / "config.json").read_text(encoding="utf-8") == config


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ("--learning-rate 1e-3", 2e-3),
        ("--learning-rate 1e-3 --optimizer adamw", 1e-3),
        ("--learning-rate 1e-3 --embedding-learning-rate 3e-3", 3e-3),
    ],
)
def test_rate_of_the_embedding(
    options: str, rate: float, app: typer.Typer, corpus: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, train(tmp_path, corpus, *options.split()))
    assert result.exit_code == 0, result.output
    progress = (tmp_path / "progress" / "progress.json").read_text(encoding="utf-8")
    assert json.loads(progress)["identity"]["embedding_learning_rate"] == rate


def test_weight_that_is_not_above_zero_is_one_line(
    app: typer.Typer, corpus: Path, tmp_path: Path
) -> None:
    command = train(tmp_path / "run", corpus)
    command[command.index(str(corpus))] = f"{corpus}:0"
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert f"everstream: the weight of {corpus} must be above 0" in result.stderr


def test_eval_says_the_same_on_either_backend(
    app: typer.Typer, corpus: Path, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, tiny_checkpoint().model, tiny_checkpoint().tokenizer)
    found = {}
    for backend in ("auto", "native", "torch"):
        options = ["--data", str(corpus), "--mode", "stream", "--backend", backend]
        result = CliRunner().invoke(app, ["eval", str(tmp_path), *options])
        assert result.exit_code == 0, result.output
        found[backend] = json.loads(result.stdout)
    assert found["auto"] == found["native"]
    assert [each["backend"] for each in found.values()] == ["native", "native", "torch"]
    bits = [each["bits_per_byte"] for each in found.values()]
    assert bits == pytest.approx([bits[0]] * 3, rel=1e-4)


def test_eval_takes_torch_where_the_native_runtime_does_not_cover_the_model(
    app: typer.Typer, corpus: Path, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("softmax")
    save_checkpoint(tmp_path, checkpoint.model, checkpoint.tokenizer)
    command = ["eval", str(tmp_path), "--data", str(corpus)]
    result = CliRunner().invoke(app, command)
    assert json.loads(result.stdout)["backend"] == "torch"
    refused = CliRunner().invoke(app, [*command, "--backend", "native"])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("everstream: ")


def test_eval_of_a_half_and_in_the_dtype_that_is_served(app: typer.Typer, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, tiny_checkpoint().model, tiny_checkpoint().tokenizer)
    corpus, found = tmp_path / "text.txt", []
    corpus.write_text(f"{TEXT}\n{TEXT}")
    for more in ([], ["--half", "first"], ["--half", "second"], ["--dtype", "int8"]):
        result = CliRunner().invoke(app, ["eval", str(tmp_path), "--data", str(corpus), *more])
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout))
    whole, first, second, int8 = found
    assert first["bytes"] + second["bytes"] == whole["bytes"]
    assert (first["half"], second["half"], whole.get("half")) == ("first", "second", None)
    assert int8["dtype"] == "int8"
    assert int8["bits_per_byte"] == pytest.approx(whole["bits_per_byte"], rel=0.05)
    command = ["eval", str(tmp_path), "--data", str(corpus), "--dtype", "int8"]
    refused = CliRunner().invoke(app, [*command, "--backend", "torch"])
    assert (refused.exit_code, refused.stderr) == (
        2,
        "everstream: --dtype int8 needs the native runtime, not --backend torch\n",
    )


def test_tokenizer_is_written(app: typer.Typer, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "tokenizer.json"
    options = ["--data", str(corpus), "--out", str(out), "--vocab-size", "280"]
    result = CliRunner().invoke(app, ["tokenizer", *options])
    assert result.exit_code == 0
    assert "280 ids" in result.stdout
    assert out.is_file()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--precision", "float16"], "precision must be"),
        (["--attention", "lstm"], "'lstm' is unknown"),
        (["--attention-options", "{"], "everstream:"),
        (["--vocab-size", "10"], "vocab_size must be at least"),
        (["--window", "100000"], "too few for a window"),
    ],
)
def test_mistake_is_one_line_and_status_2(
    app: typer.Typer, corpus: Path, tmp_path: Path, more: list[str], message: str
) -> None:
    result = CliRunner().invoke(app, train(tmp_path / "run", corpus, *more))
    assert result.exit_code == 2
    assert result.stderr.startswith("everstream: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.process
def test_help_does_not_import_torch() -> None:
    code = "import sys, model.training.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_export_halves_the_file_and_keeps_the_quality(
    app: typer.Typer, corpus: Path, tmp_path: Path
) -> None:
    out, small = tmp_path / "run", tmp_path / "small"
    CliRunner().invoke(app, train(out, corpus, "--valid", str(corpus)))
    result = CliRunner().invoke(everstream, ["export", str(out / "model"), str(small)])
    assert result.exit_code == 0, result.output
    sizes = [(f / "model.safetensors").stat().st_size for f in (out / "model", small)]
    assert sizes[1] < 0.6 * sizes[0]
    found = []
    for folder, dtype in ((out / "model", "float32"), (small, "float32"), (small, "bfloat16")):
        options = ["--data", str(corpus), "--window", "32", "--dtype", dtype]
        found.append(json.loads(CliRunner().invoke(app, ["eval", str(folder), *options]).stdout))
    whole, exported, low = (values["bits_per_byte"] for values in found)
    assert exported == pytest.approx(whole, rel=0.01)
    assert low == pytest.approx(whole, rel=0.02)
