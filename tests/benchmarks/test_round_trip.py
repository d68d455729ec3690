"""The round trip: what counts as the same reading, and what every program is given to read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.round_trip.__main__ import (
    MAX_DIFFERENCE,
    Job,
    Reading,
    agrees,
    compare,
    main,
    make_job,
    same,
)
from model.native.runtime import built
from tests.model.commands import everstream
from tests.tiny import tiny_tokenizer

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("contribute/model.md", "background/mechanisms.md", "background/streams.md")


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


#: Of the gated delta net, with sizes that GGUF has.
HEADS = {"num_key_heads": 1, "num_value_heads": 2, "key_head_dim": 8, "value_head_dim": 8}
#: Of models that are read after a few steps of training: their family and sizes.
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("mamba2", {"state_size": 16}),
    "qwen35": ("qwen35", {**HEADS, "num_key_value_heads": 1, "rotary_dim": 4, "conv_size": 3}),
    "gated_deltanet": ("qwen35", {**HEADS, "attention_layers": [], "rotary_dim": 4}),
}


@pytest.mark.process
@pytest.mark.parametrize("name", SMALL)
def test_trained_model_reads_the_same_in_transformers(
    name: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, sizes = SMALL[name]
    run = "--steps 5 --batch-size 2 --window 32 --threads 1 --vocab-size 280 --layers 4"
    options = ["--architecture", family, "--hidden-size", 16, "--head-dim", 8]
    options += ["--attention-options", json.dumps(sizes)]
    if family == "qwen35":
        options += ["--heads", 2, "--intermediate-size", 24]
    everstream("train", "--data", text, *run.split(), *options, "--out", tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        main(
            [
                *(str(tmp_path / "run" / "model"), str(text)),
                *("--transformers-python", sys.executable),
                *("--documents", "2", "--max-bytes", "150", "--tokens", "12"),
                *("--output", str(tmp_path / "result.json")),
            ]
        )
    capsys.readouterr()
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    rows = result["programs"]
    native = ["everstream, native"] if built() else []
    files = (
        ["everstream, hf"] if name == "gated_deltanet" else ["everstream, hf", "everstream, gguf"]
    )
    assert list(rows) == ["everstream, torch", *native, *files, "transformers, hf"]
    assert all(abs(row["difference"]) <= MAX_DIFFERENCE for row in rows.values())
    assert ended.value.code == (not all(map(agrees, rows.values())))


#: The committed results, and the programs that read each model.
COMMITTED = {
    "round_trip": ["everstream, pth", "rwkv, pth", "llama, gguf"],
    "round_trip_mamba2": ["transformers, hf", "llama, gguf"],
    "round_trip_qwen35": ["transformers, hf", "llama, gguf"],
    "round_trip_gated_deltanet": ["transformers, hf"],
}


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_result_is_of_all_programs_and_they_agree(name: str) -> None:
    file = DOCS.parent / "benchmarks" / "results" / f"{name}.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["programs"]
    ours = {"everstream, torch", "everstream, native", "everstream, hf"}
    if "llama, gguf" in COMMITTED[name]:
        ours.add("everstream, gguf")
        assert rows["llama, gguf"]["same_ids"] == rows["llama, gguf"]["strings"] > 0
    assert set(rows) == ours | set(COMMITTED[name])
    assert all(map(agrees, rows.values()))
