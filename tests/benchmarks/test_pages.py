"""Figures of the docs: each page has those of the committed results."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.decode.shapes import SIZES
from benchmarks.process import ROOT
from benchmarks.report import read_result
from benchmarks.studies.pages import bundled, scale, speed
from benchmarks.studies.pages.__main__ import PAGES, rendered
from tests.docs.pages import flowed, page, rows


@pytest.mark.parametrize("name", PAGES)
def test_page_has_the_figures_of_the_committed_results(name: str) -> None:
    assert rendered(name) == (ROOT / name).read_text(encoding="utf-8")


def test_every_page_with_figures_in_sentences_is_written() -> None:
    assert {place.page for place in bundled.places()} <= PAGES.keys()


def test_page_without_the_marks_of_a_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAGES, "docs/background/speed.md", lambda: {"unknown": "| a |"})
    with pytest.raises(AssertionError, match="unknown"):
        rendered("docs/background/speed.md")


def test_every_table_of_the_speed_page_was_made_from_the_results() -> None:
    made = {tuple(row) for table in speed.tables().values() for row in rows(table)}
    assert {tuple(row) for row in rows(page("speed.md"))} == made


def test_both_sizes_were_decoded_on_one_thread_and_two() -> None:
    found = {(row["size"], row["threads"]) for row in speed.read("decode")["rows"]}
    assert found == {(size, threads) for size in SIZES if size != "tiny" for threads in (1, 2)}


def test_plot_is_written(tmp_path: Path) -> None:
    file = tmp_path / "speed.png"
    speed.plot(file)
    assert file.stat().st_size > 10_000


def test_best_looks_at_no_more_threads_than_it_may() -> None:
    rows = [
        {"threads": threads, "contenders": {"llama": {"tokens_per_s": rate}}}
        for threads, rate in ((1, 10.0), (2, 30.0))
    ]
    assert [one.rate for n in (1, 2) if (one := speed.best(rows, ("llama",), n))] == [10.0, 30.0]
    assert speed.best(rows, ("gated",), 2) is None


def test_every_benchmark_that_a_page_names_can_be_run() -> None:
    pages = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]
    texts = [path.read_text(encoding="utf-8") for path in pages if path.name != "notebook.md"]
    named = {name for text in texts for name in re.findall(r"-m (benchmarks(?:\.\w+)+)", text)}
    assert len(named) > 15
    for name in named:
        package = (ROOT / name.replace(".", "/")).is_dir()
        assert find_spec(f"{name}.__main__" if package else name), name


#: Of one replica and one database, in round numbers.
INPUTS = {
    "tokens_per_s": 3000.0,
    "streams": 64,
    "commits_per_s": 45.0,
    "wal_bytes_per_token": 1000.0,
    "database_us_per_token": 20.0,
    "notice_p50_ms": 1.0,
    "state_bytes": 1 << 20,
    "stored_bytes": 1 << 21,
    "connections": 3.0,
    "idle_transactions_per_s": 10.0,
    "idle_database_cpu": 0.01,
    "state_memory_gib": 1.0,
    "database_cores": 10.0,
    "database_connections": 300,
    "database_wal_mib_s": 1000.0,
    "database_disk_tib": 1.0,
    "turn_tokens": 300,
    "moved_turns": 0.1,
}


def test_demand_of_machines_grows_and_capacity_does_not() -> None:
    ten, thousand = scale.estimate(INPUTS, 10), scale.estimate(INPUTS, 1000)
    assert (ten["streams"], ten["commits/s"], ten["connections"]) == ("640", "450", "30")
    assert ten["sessions in memory"] == "10,240"
    stored = "stored sessions of one database"
    assert ten[stored] == thousand[stored] == f"{1 << 19:,}"
    parts = ("CPU", "log", "notices, one after another", "connections")
    assert [ten[f"part of its {name}"] for name in parts] == ["7%", "3%", "2%", "10%"]
    assert thousand["part of its connections"] == "1000%"
    assert (ten["breaks first"], ten["machines that it can serve"]) == ("connections", "100")


def test_page_on_replicas_names_the_first_limit() -> None:
    measured = scale.inputs_of(read_result(scale.RESULT)["parts"])
    found = scale.estimate({**measured, **scale.ASSUMED}, scale.MACHINES[0])
    assert found["breaks first"] == "log"
    limit = f"the log is the first limit, at {found['machines that it can serve']} machines"
    assert limit in flowed(page("replicas.md"))


def test_another_resource_is_first_where_it_is_scarce() -> None:
    scarce = {**INPUTS, "database_cores": 0.1, "database_connections": 10**6}
    assert scale.estimate(scarce, 10)["breaks first"] == "CPU"
