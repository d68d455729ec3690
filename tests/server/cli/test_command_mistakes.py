"""What a user gets wrong, command by command: one line that says what, and exit status 2."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from model.bundled_models import DEFAULT_MODEL
from tests.server.cli.test_commands import run, the_line

SMALL = (
    "--steps 2 --batch-size 2 --window 16 --vocab-size 270 --hidden-size 16 --layers 1 --heads 1"
    " --head-dim 8 --intermediate-size 16 --threads 1"
)
TINY = SMALL.split()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Things to name on a command line."""
    files = {name: tmp_path / name for name in ("TEXT", "EMPTY", "BINARY", "FOLDER", "NOWHERE")}
    files["TEXT"].write_text("Once upon a time there was a sea. " * 40)
    files["EMPTY"].write_text("")
    files["BINARY"].write_bytes(bytes(range(256)))
    files["FOLDER"].mkdir()
    return files


def command(text: str, files: dict[str, Path]) -> list[object]:
    return [files.get(word, word) for word in text.split()]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("serv", "No such command 'serv'. Did you mean 'serve'? See 'everstream --help'."),
        ("generate x --threads 0", "--threads"),
        ("generate x --temperature nan", "temperature: must be in 0..100"),
        ("generate x --model FOLDER", "has no config.json"),
        ("inspect FOLDER", "has no config.json"),
        ("serve --port 0 --model FOLDER", "has no config.json"),
        ("serve --port 70000", "--port"),
        ("serve --max-sessions 0", "--max-sessions"),
        ("serve --state-memory lots", "--state-memory"),
        ("serve --session-ttl -1", "--session-ttl"),
        ("serve --dtype int3", "--dtype"),
        ("serve --allow-origin nonsense", "--allow-origin"),
        ("generate x --model gpt2", "owner/name on the Hugging Face hub"),
        ("generate \udce9", "the prompt is not UTF-8"),
        ("inspect TEXT", "not a folder"),
        ("chat --url 127.0.0.1:8400", "url must be http://host[:port]"),
        ("chat --url http://127.0.0.1:99999", "url must be http://host[:port]"),
        ("chat --url http://[::1", "url must be http://host[:port]"),
        ("chat --api-key \u00e9", "api_key must be printable ASCII"),
        ("bench --url 127.0.0.1:8400", "url must be http://host[:port]"),
        ("bench --url http://:80", "url must be http://host[:port]"),
        ("bench --api-key \u00e9", "api_key must be printable ASCII"),
        ("bench --rate nan", "--rate: must be comma-separated numbers"),
        ("bench --prompt-file BINARY", "utf-8"),
        ("tokenizer --data TEXT --out FOLDER", "FOLDER: Is a directory"),
        ("tokenizer --data TEXT --out NOWHERE/t.json", "No such file or directory"),
        ("eval nowhere --data TEXT", "no such folder"),
        ("store check TEXT", "TEXT"),
        ("store export FOLDER s TEXT", "has no store"),
        ("key A", "a name has 1 to 63"),
    ],
)
def test_mistake_is_one_line(text: str, words: str, files: dict[str, Path]) -> None:
    assert words in the_line(run(*command(text, files)))


def test_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = the_line(run("serve", "--port", port, "--store", "memory"))
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; --port takes" in line


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--threads 0", "--threads"),
        ("--threads -1", "--threads"),
        ("--learning-rate nan", "learning_rate must be above 0"),
        ("--learning-rate -1", "learning_rate must be above 0"),
        ("--clip 0", "clip must be above 0"),
        ("--weight-decay -5", "weight_decay must be at least 0"),
        ("--save-every-s -1", "save_every_s must be at least 0"),
        ("--seed -1", "seed must be at least 0"),
        ("--tokenizer FOLDER", "FOLDER"),
        ("--valid EMPTY", "EMPTY holds no text"),
        ("--data EMPTY", ""),
        ("--out TEXT", "TEXT: File exists"),
    ],
)
def test_mistake_of_a_training_is_one_line(more: str, words: str, files: dict[str, Path]) -> None:
    given: dict[str, Any] = {"--data": files["TEXT"], "--out": files["NOWHERE"]}
    flag, value = command(more, files)
    if flag in given:
        given[str(flag)] = value
        flag = None
    pairs = [part for pair in given.items() for part in pair]
    rest = [] if flag is None else [flag, value]
    line = the_line(run("train", *pairs, *TINY, *rest))
    assert words in line


def test_training_on_no_text_names_the_file(files: dict[str, Path]) -> None:
    out = files["NOWHERE"]
    empty = files["EMPTY"]
    tokenizer = DEFAULT_MODEL / "tokenizer.json"
    line = the_line(run("train", "--data", empty, "--out", out, "--tokenizer", tokenizer))
    assert "EMPTY: no text to train on" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["train", "convert"])
def test_cuda_where_there_is_none_is_one_line(name: str, files: dict[str, Path]) -> None:
    text, out = files["TEXT"], files["NOWHERE"]
    more = {
        "train": TINY,
        "convert": ["--from", DEFAULT_MODEL, "--to", "performer", "--valid", text],
    }[name]
    line = the_line(run(name, "--data", text, "--out", out, *more, "--device", "cuda"))
    assert "device cuda: this torch finds no CUDA device" in line


def test_export_into_the_models_own_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEFAULT_MODEL, folder)
    before = (folder / "model.safetensors").read_bytes()
    assert "is the model's own folder" in the_line(run("export", folder, folder))
    assert (folder / "model.safetensors").read_bytes() == before


def test_unfinished_training_reports_its_step_and_no_model(files: dict[str, Path]) -> None:
    out = files["NOWHERE"]
    words = ["train", "--data", files["TEXT"], "--out", out, *TINY]
    first = run(*words, "--stop-at-step", 1)
    assert first.exit_code == 0, first.output
    assert first.stdout.endswith(
        "stopped at step 1 of 2; no model is exported yet;"
        " the same command again continues the run\n"
    )
    assert not (out / "model").exists()
    second = run(*words)
    assert second.stdout.endswith(f"the model is in {out / 'model'}\n")
    assert (out / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("words", [["chat"], ["bench", "--concurrency", "1"]])
def test_server_that_is_away_is_one_line_and_status_1(words: list[str]) -> None:
    result = run(*words, "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("everstream: ")
    assert "http://127.0.0.1:1" in line


@pytest.mark.parametrize("words", [[], ["-"]])
def test_generate_reads_standard_input(words: list[str]) -> None:
    from typer.testing import CliRunner

    from server.cli.main import app

    command = ["generate", *words, "--max-tokens", "4", "--seed", "1"]
    piped = CliRunner().invoke(app, command, input="Once upon\na time\n")
    given = run("generate", "Once upon\na time", "--max-tokens", 4, "--seed", 1)
    assert piped.exit_code == 0, piped.output
    assert piped.stdout == given.stdout
    assert piped.stdout.startswith("Once upon\na time")
