"""The committed comparison has every mechanism, and the page's command makes every run of it."""

from __future__ import annotations

import shlex
from pathlib import Path

from benchmarks.report import read_result
from benchmarks.studies.mechanisms import language, plan
from benchmarks.studies.mechanisms.__main__ import arguments
from benchmarks.studies.mechanisms.folder import Folder
from benchmarks.studies.mechanisms.specs import Spec
from benchmarks.studies.pages.comparison import RESULT
from model.attention import MECHANISMS
from tests.docs.pages import DOCS


def test_every_mechanism_was_compared() -> None:
    runs = read_result(RESULT)["runs"]
    trained = {Spec.parse(run["mechanism"]).attention for run in runs if run["kind"] == "language"}
    assert trained - MECHANISMS.keys() == {"mamba2", "rwkv7"}
    assert MECHANISMS.keys() <= trained


def test_command_of_the_page_makes_every_run() -> None:
    page = (DOCS / "contribute/comparison-tables.md").read_text(encoding="utf-8")
    begin = page.index("python -m benchmarks.studies.mechanisms ablation")
    command = page[begin:].partition("\npython")[0]
    options = arguments(shlex.split(command.replace("\\\n", " "))[3:])
    recipe = language.Recipe(
        tuple(options.data),
        options.valid,
        options.out_of_domain,
        num_steps=options.steps,
        warmup_steps=options.warmup_steps,
        batch_size=options.batch_size,
    )
    planned = {job.name: job for job in plan.jobs(Folder(Path("runs")), recipe)}
    runs = [run for run in read_result(RESULT)["runs"] if run["kind"] != "speed"]
    assert {run["name"] for run in runs} <= planned.keys()
    for run in runs:
        if run["kind"] == "language":
            made, wanted = run["recipe"], planned[run["name"]].run.args[-1]
            assert made["num_steps"] == wanted.num_steps
            assert made["warmup_steps"] == wanted.warmup_steps
            assert made["batch_size"] == wanted.batch_size
