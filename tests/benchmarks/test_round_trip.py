"""An RWKV-7 that is trained here reads and writes the same in other programs.

The model is made from scratch, on the pages of the documentation, and exported by the command.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.round_trip.__main__ import Job, Reading, agrees, compare, main, make_job, same
from model.architectures.rwkv7.config import Rwkv7Config
from model.checkpoint import load_checkpoint
from model.native.runtime import built
from model.tokenizer import Tokenizer
from model.training.config import TrainConfig
from model.training.data import Source
from model.training.loop import train
from tests.model.attention.packages import folder as package_folder

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("model.md", "mechanisms.md", "streams.md")
STEPS = 40


def vocabulary(path: Path, text: str) -> Path:
    """An RWKV vocabulary: the bytes, and the commonest words with the space before them."""
    words = Counter(re.findall(r" [a-z]+", text)).most_common(200)
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word, _ in words]
    lines = [f"{id} {token!r} {len(token)}\n" for id, token in enumerate(tokens, start=1)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "docs.txt"
    pages = [(DOCS / name).read_text(encoding="utf-8") for name in PAGES]
    path.write_text("<|endoftext|>\n".join(pages), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def model(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model after `STEPS` steps."""
    out = tmp_path_factory.mktemp("run")
    ids = Tokenizer.load(vocabulary(out / "vocab.txt", text.read_text(encoding="utf-8")))
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "head_dim": 64}
    config = TrainConfig(
        (Source(text),),
        out,
        num_steps=STEPS,
        batch_size=4,
        window=64,
        warmup_steps=5,
        embedding_learning_rate=4e-3,
        eval_every=STEPS,
        precision="float32",
        threads=1,
    )
    return train(config, Rwkv7Config.for_training(ids.vocab_size, ids.eos_token_id, sizes), ids)


def test_every_program_reads_and_writes_the_same(model: Path, text: Path, tmp_path: Path) -> None:
    package_folder("rwkv")
    command = [str(model), str(text), "--output", str(tmp_path / "result.json")]
    command += ["--rwkv-python", sys.executable, "--documents", "3", "--max-bytes", "600"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--tokens", "40"])
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    rows = result["programs"]
    assert ended.value.code == 0, rows
    assert result["bytes"] == 1800
    native = ["everstream, native"] if built() else []
    files = ["everstream, pth", "everstream, hf", "everstream, gguf", "rwkv, pth"]
    assert list(rows) == ["everstream, torch", *native, *files]
    for row in rows.values():
        assert 1.0 < row["bits_per_byte"] < 5.0
        assert row["same_greedy_tokens"] == row["greedy_tokens"] == 120
        assert abs(row["difference"]) < 1e-4


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


def test_job_has_the_beginnings_of_the_documents(text: Path, model: Path) -> None:
    tokenizer = load_checkpoint(model).tokenizer
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
