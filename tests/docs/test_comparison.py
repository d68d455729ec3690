"""The committed comparison has every mechanism, and every run its command."""

from __future__ import annotations

import shlex

from benchmarks.mechanisms.__main__ import arguments
from benchmarks.mechanisms.specs import Spec
from benchmarks.pages.comparison import RESULT, commands
from benchmarks.report import read_result
from model.attention import MECHANISMS


def test_every_mechanism_was_compared() -> None:
    runs = read_result(RESULT)["runs"]
    trained = {Spec.parse(run["mechanism"]).attention for run in runs if run["kind"] == "language"}
    recalled = {Spec.parse(run["mechanism"]).attention for run in runs if run["kind"] == "recall"}
    assert trained == recalled == MECHANISMS.keys()


def test_commands_make_every_run_once() -> None:
    runs = read_result(RESULT)["runs"]
    wanted = [(run["kind"], run.get("size"), run["mechanism"], run.get("seed")) for run in runs]
    kinds = {"train": "language", "recall": "recall", "speed": "speed"}
    made = []
    for block in commands(runs).values():
        for line in block.strip("`sh\n").splitlines():
            options = arguments(shlex.split(line)[3:])
            sizes, seeds = getattr(options, "sizes", [None]), getattr(options, "seeds", [None])
            made += [
                (kinds[options.command], size, str(Spec.parse(name)), seed)
                for size in sizes
                for seed in seeds
                for name in options.mechanisms
            ]
    assert sorted(made, key=str) == sorted(wanted, key=str)
