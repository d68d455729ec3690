from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from model.checkpoint import save_checkpoint
from tests.model.commands import everstream, refused
from tests.tiny import TEXT, tiny_checkpoint, write_model

TINY = "--hidden-size 16 --layers 1 --heads 2 --head-dim 8 --intermediate-size 24"
RUN = "--steps 3 --batch-size 2 --window 32 --threads 1 --vocab-size 280"
ROOT = Path(__file__).parents[3]


def train(out: Path, corpus: object, *more: object) -> list[object]:
    return ["train", "--data", corpus, "--out", out, *TINY.split(), *RUN.split(), *more]


@pytest.mark.slow
def test_train_then_eval(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    everstream(*train(out, corpus, "--valid", corpus))
    for mode in ("windows", "stream", "sliding"):
        options = ["--data", corpus, "--mode", mode, "--window", 32]
        values = json.loads(everstream("eval", out / "model", *options))
        assert values["mode"] == mode
        assert 0 < values["bits_per_byte"] < 9


def test_second_run_starts_from_the_first_and_ends_on_another_mix(
    corpus: Path, tmp_path: Path
) -> None:
    first, last, other = tmp_path / "first", tmp_path / "last", tmp_path / "other.txt"
    other.write_text(corpus.read_text(encoding="utf-8").replace("fox", "hen"), encoding="utf-8")
    everstream(*train(first, corpus))
    options = ["--data", f"{corpus}:2", "--data", other, "--final-data", f"{other}:3"]
    valid = ["--valid", corpus, "--valid", other, "--eval-every", 3]
    start = ["--init-from", first / "model", "--out", last]
    everstream("train", *options, *valid, *start, *RUN.split())
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
def test_rate_of_the_embedding(options: str, rate: float, corpus: Path, tmp_path: Path) -> None:
    everstream(*train(tmp_path, corpus, *options.split()))
    progress = (tmp_path / "progress" / "progress.json").read_text(encoding="utf-8")
    assert json.loads(progress)["identity"]["embedding_learning_rate"] == rate


def test_weight_that_is_not_above_zero_is_one_line(corpus: Path, tmp_path: Path) -> None:
    said = refused(*train(tmp_path / "run", f"{corpus}:0"))
    assert said.startswith(f"the weight of {corpus} must be above 0")


def test_eval_prints_the_same_on_either_backend(corpus: Path, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, tiny_checkpoint().model, tiny_checkpoint().tokenizer)
    found = {}
    for backend in ("auto", "native", "torch"):
        options = ["--data", corpus, "--mode", "stream", "--backend", backend]
        found[backend] = json.loads(everstream("eval", tmp_path, *options))
    assert found["auto"] == found["native"]
    assert [each["backend"] for each in found.values()] == ["native", "native", "torch"]
    bits = [each["bits_per_byte"] for each in found.values()]
    assert bits == pytest.approx([bits[0]] * 3, rel=1e-4)


def test_eval_takes_torch_where_the_native_runtime_does_not_cover_the_model(
    corpus: Path, tmp_path: Path
) -> None:
    write_model(tmp_path, attention="softmax")
    command = ["eval", tmp_path, "--data", corpus]
    assert json.loads(everstream(*command))["backend"] == "torch"
    assert "softmax" in refused(*command, "--backend", "native")


def test_eval_of_a_half_and_in_the_dtype_that_is_served(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, tiny_checkpoint().model, tiny_checkpoint().tokenizer)
    corpus = tmp_path / "text.txt"
    corpus.write_text(f"{TEXT}\n{TEXT}")
    whole, first, second, int8 = (
        json.loads(everstream("eval", tmp_path, "--data", corpus, *more))
        for more in ([], ["--half", "first"], ["--half", "second"], ["--dtype", "int8"])
    )
    assert first["bytes"] + second["bytes"] == whole["bytes"]
    assert (first["half"], second["half"], whole.get("half")) == ("first", "second", None)
    assert int8["dtype"] == "int8"
    assert int8["bits_per_byte"] == pytest.approx(whole["bits_per_byte"], rel=0.05)
    command = ["eval", tmp_path, "--data", corpus, "--dtype", "int8", "--backend", "torch"]
    assert refused(*command) == "--dtype int8 needs the native runtime, not --backend torch"


def test_tokenizer_is_written(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "tokenizer.json"
    said = everstream("tokenizer", "--data", corpus, "--out", out, "--vocab-size", 280)
    assert "280 ids" in said
    assert out.is_file()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--precision", "float16"], "precision must be"),
        (["--attention", "lstm"], "'lstm' is unknown"),
        (["--attention-options", "{"], ""),
        (["--vocab-size", "10"], "vocab_size must be at least"),
        (["--window", "100000"], "too few for a window"),
    ],
)
def test_mistake_is_one_line_and_status_2(
    corpus: Path, tmp_path: Path, more: list[str], message: str
) -> None:
    assert message in refused(*train(tmp_path / "run", corpus, *more))


@pytest.mark.process
def test_help_does_not_import_torch() -> None:
    code = "import sys, model.training.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_export_halves_the_file_and_keeps_the_quality(corpus: Path, tmp_path: Path) -> None:
    out, small = tmp_path / "run", tmp_path / "small"
    everstream(*train(out, corpus, "--valid", corpus))
    everstream("export", out / "model", small)
    sizes = [(f / "model.safetensors").stat().st_size for f in (out / "model", small)]
    assert sizes[1] < 0.6 * sizes[0]
    found = []
    for folder, dtype in ((out / "model", "float32"), (small, "float32"), (small, "bfloat16")):
        options = ["--data", corpus, "--window", 32, "--dtype", dtype]
        found.append(json.loads(everstream("eval", folder, *options)))
    whole, exported, low = (values["bits_per_byte"] for values in found)
    assert exported == pytest.approx(whole, rel=0.01)
    assert low == pytest.approx(whole, rel=0.02)
