"""The card of the bundled models says what was measured, of the very files that are there."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.studies.model_card.__main__ import CURVE, NUM_SAMPLES, PAGE, card, samples
from benchmarks.studies.model_card.facts import (
    CREDITS,
    CREDITS_OF_DATA,
    NUM_POINTS,
    SEEDS,
    facts_of_run,
    file_facts,
    read,
    shape_facts,
)
from model.bundled_models import DEFAULT_NAME
from model.checkpoint import load_checkpoint
from model.hub.base import whole_models
from server.cli.main import app
from server.engine.sampling import published
from tests.tiny import TEXT, tiny_tokenizer

RESULT = read()


def test_card_is_that_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == card(RESULT)
    assert CURVE.is_file()


def test_every_bundled_model_is_in_the_results() -> None:
    assert list(RESULT["models"]) == list(whole_models())


@pytest.mark.parametrize("name", whole_models())
def test_results_are_of_the_files_that_are_there(name: str) -> None:
    folder, model = whole_models()[name], RESULT["models"][name]
    assert model["files"] == {path.name: file_facts(path) for path in folder.iterdir()}
    facts = shape_facts(load_checkpoint(folder))
    assert {key: model[key] for key in facts} == facts


def test_samples_are_unchosen_and_of_the_default_sampling() -> None:
    assert RESULT["sampling"] == published()
    for model in RESULT["models"].values():
        assert [one["seed"] for one in model["samples"]] == list(SEEDS)
        assert all(one["text"].startswith(RESULT["prompt"]) for one in model["samples"])
    shown = samples(RESULT["models"][DEFAULT_NAME]["samples"])
    assert [seed for seed in SEEDS if f"**{seed}.** " in shown] == list(SEEDS)[:NUM_SAMPLES]


def test_every_author_is_credited() -> None:
    with CREDITS.open(encoding="utf-8", newline="") as file:
        credited = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert file_facts(CREDITS) == RESULT["data"][CREDITS_OF_DATA]
    assert len(credited) > 700
    assert all(one["title"] and one["licence"] for one in credited)
    assert all(one["text by"].strip() or one["other credits"].strip() for one in credited)


def test_command_of_a_run_makes_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT * 8, encoding="utf-8")
    tiny_tokenizer().save(Path("tokenizer.json"))
    shape = "--hidden-size 16 --layers 1 --heads 2 --head-dim 8 --intermediate-size 24"
    run = "--steps 3 --batch-size 2 --window 16 --threads 1 --learning-rate 0.004 --seed 7"
    texts = "--data text.txt --valid text.txt --tokenizer tokenizer.json"
    command = f"train {texts} --attention elu {shape} {run} --out first"
    assert CliRunner().invoke(app, command.split()).exit_code == 0
    facts = facts_of_run(Path("first"))
    words = shlex.split(facts["command"])
    assert words[:2] == ["everstream", "train"]
    assert words[-2:] == ["--out", "runs/first"]
    assert CliRunner().invoke(app, [*words[1:], "--threads", "1"]).exit_code == 0
    identities = [
        json.loads((Path(run) / "progress" / "progress.json").read_text())["identity"]
        for run in ("first", "runs/first")
    ]
    assert identities[0] == identities[1]
    assert (facts["steps"], facts["tokens"], facts["data"]) == (3, 3 * 2 * 16, ["text.txt"])
    assert len(facts["loss"]) == 3 <= NUM_POINTS
    assert facts["valid_bits_per_byte"][-1]["tokens"] == 96
