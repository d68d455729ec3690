"""The round trip: what counts as the same reading, and what every program is given to read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.round_trip.__main__ import Job, Reading, agrees, compare, make_job, same
from tests.tiny import tiny_tokenizer

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("model.md", "mechanisms.md", "streams.md")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "docs.txt"
    pages = [(DOCS / name).read_text(encoding="utf-8") for name in PAGES]
    path.write_text("<|endoftext|>\n".join(pages), encoding="utf-8")
    return path


def test_greedy_text_is_the_same_up_to_the_first_other_token() -> None:
    assert same([1, 2, 3], [1, 2, 3]) == 3
    assert same([1, 2, 3], [1, 5, 3]) == 1
    assert same([4], [5]) == 0


def test_program_that_differs_is_seen() -> None:
    job = Job(["ab", "c"], [[0, 8, 9], [0, 10]], [[0], [0]], num_tokens=3, num_bytes=100)
    wanted = Reading(100.0, [[1, 2, 3], [4, 5, 6]])
    found = {
        "ours": wanted,
        "equal": Reading(100.0 + 1e-4, wanted.greedy, [[8, 9], [10]]),
        "other text": Reading(100.0, [[1, 2, 3], [4, 5, 7]]),
        "other bits": Reading(100.2, wanted.greedy),
        "other ids": Reading(100.0, wanted.greedy, [[8, 9], [11]]),
    }
    rows = compare(found, job)
    assert [agrees(row) for row in rows.values()] == [True, True, False, False, False]
    assert (rows["other ids"]["same_ids"], rows["other ids"]["strings"]) == (1, 2)
    assert rows["other text"]["same_greedy_tokens"] == 5
    assert rows["other bits"]["difference"] == pytest.approx(0.2 / 100 / 0.693147, rel=1e-4)


def test_job_has_the_beginnings_of_the_documents(text: Path) -> None:
    tokenizer = tiny_tokenizer()
    job = make_job(tokenizer, text, max_bytes=50, num_documents=2, num_tokens=7)
    assert job.strings == [(DOCS / page).read_text(encoding="utf-8")[:50] for page in PAGES[:2]]
    assert [tokenizer.decode(ids) for ids in job.texts] == job.strings
    assert all(ids[0] == tokenizer.eos_token_id for ids in job.texts)
    assert job.prompts == [ids[:16] for ids in job.texts]
    assert job.num_bytes == 100
    saved = json.loads(job.save(text.with_suffix(".json")).read_text(encoding="utf-8"))
    assert Job(**saved) == job


def test_committed_result_is_of_all_programs_and_they_agree() -> None:
    file = DOCS.parent / "benchmarks" / "results" / "round_trip.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["programs"]
    files = ["everstream, pth", "everstream, hf", "everstream, gguf", "rwkv, pth", "llama, gguf"]
    assert list(rows) == ["everstream, torch", "everstream, native", *files]
    assert all(map(agrees, rows.values()))
    assert rows["llama, gguf"]["same_ids"] == rows["llama, gguf"]["strings"] > 0
