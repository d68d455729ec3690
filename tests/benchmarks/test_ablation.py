"""The ablation's driver runs what is missing, continues, and its results become tables."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies.mechanisms import conversion, language, plan
from benchmarks.studies.mechanisms.ablation import listed, named, run_jobs
from benchmarks.studies.mechanisms.folder import Folder, RunError, read_results
from benchmarks.studies.mechanisms.gather import seed_deviation
from benchmarks.studies.mechanisms.plan import Job, jobs, matched_size, seconds
from benchmarks.studies.mechanisms.recall import NOTHING
from benchmarks.studies.mechanisms.specs import FAMILIES, SIZES, Spec, state_bytes
from benchmarks.studies.pages import ablation
from model.weights import num_parameters
from tests.tiny import TEXT


@pytest.fixture
def recipe(tmp_path: Path) -> language.Recipe:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 40, encoding="utf-8")
    return language.Recipe(
        (path,),
        path,
        path,
        num_steps=2,
        batch_size=2,
        window=16,
        warmup_steps=1,
        precision="float32",
        eval_bytes=300,
    )


@pytest.fixture
def small_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """One seed, and of each question few mechanisms at the smallest size."""
    monkeypatch.setitem(plan.SIZES, "small", SIZES["tiny"])
    for name, value in {
        "PARTS": ("softmax", "elu:conv_size=4,gate=true,norm=true", *FAMILIES),
        "MAPS": ("relu",),
        "SEEDS": (0,),
        "RATES": (6e-3, 3e-3),
        "RATED": ("softmax",),
        "LONG": ("elu",),
        "LONG_TOKENS_PER_PARAMETER": 1e-4,
        "STATES": (8192,),
        "RECALLED": ("delta:decay=false",),
        "CONVERTED": ("softmax", "elu"),
    }.items():
        monkeypatch.setattr(plan, name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("small_plan")
def test_whole_plan_runs_once_and_becomes_tables(
    tmp_path: Path, recipe: language.Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(tmp_path / "runs")
    todo = jobs(folder, recipe, recall_steps=2)
    assert run_jobs(folder, todo) == []
    assert "15 of 15 runs done, about 0.0 h left" in capsys.readouterr().out
    assert run_jobs(folder, todo) == []
    assert "done in" not in capsys.readouterr().out
    runs = read_results(folder.path)
    assert {run["name"] for run in runs} == {job.name for job in todo}
    assert all("/" not in run["command"] for run in runs)
    tables = ablation.tables_of(runs)
    assert set(tables) == {f"ablation, {question}" for question in plan.QUESTIONS}
    assert ablation.NOTHING not in tables.values()
    by_name = {run["name"]: run for run in runs}
    control, converted = by_name["conversion-softmax"], by_name["conversion-elu"]
    assert control["num_tokens"] == converted["num_tokens"]
    assert control["bits_per_byte"]["original"] == pytest.approx(
        converted["bits_per_byte"]["original"], rel=1e-4
    )
    for name in ("softmax", "mamba2", "rwkv7"):
        assert f"| `{name}` | 1 |" in tables["ablation, parts"]


def test_conversion_without_its_source_is_refused(tmp_path: Path, recipe: language.Recipe) -> None:
    folder = Folder(tmp_path / "runs")
    with pytest.raises(RunError, match="model is not there"):
        conversion.run(folder, "c", tmp_path / "model", Spec("elu"), recipe)


def test_failed_run_does_not_end_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> dict[str, Any]:
        raise RunError("the loss is nan")

    todo = [
        Job("a", "parts", "elu", 4096.0, dict),
        Job("b", "parts", "elu", 4096.0, fail),
        Job("c", "parts", "elu", 4096.0, dict),
    ]
    folder = Folder(tmp_path)
    assert run_jobs(folder, todo) == ["b"]
    assert [job.name for job in todo if folder.result(job.name).is_file()] == ["a", "c"]
    assert "error: b: the loss is nan" in capsys.readouterr().err
    assert [line.split()[1] for line in listed(folder, todo).splitlines()] == [
        "done",
        "open",
        "done",
    ]


def test_runs_are_chosen_by_name_in_the_order_of_the_names() -> None:
    todo = [Job(name, "parts", "elu", 4096.0, dict) for name in ("a", "b", "c")]
    assert [job.name for job in named(todo, ["c", "a"])] == ["c", "a"]
    with pytest.raises(RunError, match="--names: no such run: d, e "):
        named(todo, ["d", "a", "e"])


@pytest.mark.process
def test_jobs_side_by_side_run_conversions_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = {"c": "conversion", "a": "parts", "b": "parts"}
    todo = [Job(name, question, "elu", 4096.0, dict) for name, question in questions.items()]
    folder = Folder(tmp_path)
    assert run_jobs(folder, todo, workers=2) == []
    assert all(folder.result(name).is_file() for name in questions)
    written = {name: folder.result(name).stat().st_mtime_ns for name in questions}
    assert written["c"] == max(written.values())
    assert "3 of 3 runs done" in capsys.readouterr().out


def test_time_left_follows_the_pace_of_finished_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    todo = [Job(name, "parts", "elu", 1e7, dict) for name in ("a", "b", "c")]
    expected = seconds(todo[0], 1.0)
    times = iter([0.0, 3 * expected, 6 * expected, 9 * expected])
    run_jobs(Folder(tmp_path), todo, lambda: next(times))
    left = [line for line in capsys.readouterr().out.splitlines() if "left" in line]
    hours = [float(line.split()[-3]) for line in left]
    unit = expected / 3600
    assert hours == pytest.approx([3 * unit, 6 * unit, 3 * unit, 0], abs=0.06)


def test_plan_has_each_run_once_and_the_first_seed_first(recipe: language.Recipe) -> None:
    found = jobs(Folder(Path("runs")), recipe)
    names = [job.name for job in found]
    assert len(set(names)) == len(names)
    parts = [job.name[-1] for job in found if job.question == "parts"]
    assert parts == sorted(parts)
    assert {job.question for job in found} == set(plan.QUESTIONS)
    assert names.index("parts-small-softmax-0") < names.index("conversion-performer")


@pytest.mark.parametrize("name", plan.RECALLED)
@pytest.mark.parametrize("wanted", plan.STATES)
def test_states_of_recall_are_matched(name: str, wanted: int) -> None:
    spec = Spec.parse(name)
    found = state_bytes(spec.config(matched_size(spec, wanted), NOTHING + 1))
    assert found is not None
    assert abs(found / wanted - 1) < 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_as_many_parameters_without_their_head(name: str) -> None:
    config = Spec.parse(name).config(SIZES["small"], 2048)
    head = 2048 * 128 if name == "rwkv7" else 0
    wanted = SIZES["small"].num_parameters(2048)
    assert abs((num_parameters(config) - head) / wanted - 1) <= 0.01


def test_tables_have_seeds_and_say_what_is_missing() -> None:
    runs = [
        {
            "name": f"parts-small-{name}-{seed}",
            "mechanism": name,
            "seed": seed,
            "num_parameters": 1000,
            "state_bytes": 64,
            "recipe": {"learning_rate": 6e-3},
            "quality": {
                "valid": {"bits_per_byte": {"windows": bits + 0.1 * seed, "long": bits}},
                "out_of_domain": {"bits_per_byte": {"windows": 4.0}},
            },
        }
        for name, bits in (("softmax", 2.0), ("delta", 1.5))
        for seed in (0, 1)
    ]
    tables = ablation.tables_of(runs)
    first, second = tables["ablation, parts"].splitlines()[2:]
    assert first == "| `delta` | 2 | 1.5500 ± 0.1000 | 1.5000 | 64 |"
    assert second.startswith("| `softmax` | 2 | 2.0500 ± 0.1000 | 2.0000 |")
    assert tables["ablation, recall"] == ablation.NOTHING


def test_deviation_of_a_seed_is_pooled_over_rows_with_several() -> None:
    assert seed_deviation([[1.0, 1.2], [3.0], [2.0, 2.1, 2.2]]) == pytest.approx(
        math.sqrt((0.02 + 2 * 0.01) / 3)
    )
    assert seed_deviation([[1.0]]) == 0.0
