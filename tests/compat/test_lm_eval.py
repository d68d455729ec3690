"""lm-eval's `local-completions`, whose scores are those of our own engine, to the last bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint import load_checkpoint
from model.state import StateLayout
from server.engine.runner import CpuStatePool, Feed, TokenScore
from server.engine.types import SamplingParams
from server.models.backend import Backend, open_backend
from tests.chosen_model import bundled_model
from tests.compat.environments import python_client

pytestmark = pytest.mark.usefixtures("long")

TASKS = ("everstream_choice", "everstream_text", "everstream_until")
#: So small that a text of the task comes in several windows.
MAX_LENGTH = 96
MAX_GENERATED = 24
START = 0

Sample = dict[str, Any]


class Direct:
    """Our own engine's scores of token ids, without a server."""

    def __init__(self, backend: Backend) -> None:
        self._pool = CpuStatePool(StateLayout.of(backend.config), 1)
        self._runner = backend.make_runner(self._pool)
        self.tokenizer = backend.tokenizer

    def likelihood(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """The sum over ``continuation``, and whether each of its tokens is the most likely."""
        ids = [*context, *continuation]
        scored = self._score(ids)[len(context) - 1 :]
        return sum(each.logprob for each in scored), all(
            each.logprob == each.top[0][1] for each in scored
        )

    def until(self, prompt: list[int], stops: tuple[str, ...]) -> str:
        """How ``prompt`` continues greedily, before the first of ``stops``."""
        draw = self._runner.prepare(SamplingParams(temperature=0))
        slot = self._slot()
        tokens, position, ids = prompt, 0, list[int]()
        for _ in range(MAX_GENERATED):
            (((token,), *_),) = self._runner.run([Feed(slot, position, tokens, draw)])
            position += len(tokens)
            tokens = [token]
            ids.append(token)
        self._pool.free(slot)
        text = self.tokenizer.decode(ids)
        return text[: min((text.find(stop) for stop in stops if stop in text), default=None)]

    def _score(self, ids: list[int]) -> list[TokenScore]:
        slot = self._slot()
        scored = self._runner.score(Feed(slot, 0, ids[:-1]), ids[-1], num_top=1)
        self._pool.free(slot)
        return scored

    def _slot(self) -> int:
        slot = self._pool.allocate()
        assert slot is not None
        return slot


@pytest.fixture(scope="module")
def direct() -> Direct:
    return Direct(open_backend(load_checkpoint(bundled_model())))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("num_concurrent", "batch_size"), [(1, 1), (1, 4), (4, 2)])
def test_scores_are_those_of_the_engine(
    num_concurrent: int,
    batch_size: int,
    environment: dict[str, str],
    direct: Direct,
    tmp_path: Path,
) -> None:
    samples = run_lm_eval(num_concurrent, batch_size, environment, tmp_path)
    for sample in samples["everstream_choice"]:
        check_choice(sample, direct)
    for sample in samples["everstream_text"]:
        check_text(sample, direct)
    assert any(
        len(windows(direct.tokenizer.encode(s["doc"]["text"]))) > 2
        for s in samples["everstream_text"]
    )
    for sample in samples["everstream_until"]:
        context = direct.tokenizer.encode(sample["doc"]["context"])
        assert sample["resps"] == [[direct.until(context, (".", "\n"))]]


def run_lm_eval(
    num_concurrent: int, batch_size: int, environment: dict[str, str], place: Path
) -> dict[str, list[Sample]]:
    """Runs its command; what it has written down of each task."""
    url = environment["EVERSTREAM_URL"]
    arguments = (
        f"model=everstream-stories,base_url={url}/v1/completions,auth_token=usual,"
        f"max_length={MAX_LENGTH},num_concurrent={num_concurrent}"
    )
    python_client("lmeval").run(
        *("-m", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments),
        *("--batch_size", batch_size),
        *("--include_path", "tasks", "--tasks", ",".join(TASKS)),
        *("--output_path", place / "out", "--log_samples"),
        timeout_s=300,
        OPENAI_API_KEY="usual",
        HF_HOME=str(place / "hugging-face"),
        **environment,
    )
    (results,) = (place / "out").rglob("results_*.json")
    assert set(json.loads(results.read_text())["results"]) == set(TASKS)
    return {task: list(logged(place / "out", task)) for task in TASKS}


def logged(place: Path, task: str) -> Iterator[Sample]:
    (path,) = place.rglob(f"samples_{task}_*.jsonl")
    for line in path.read_text().splitlines():
        yield json.loads(line)


def check_choice(sample: Sample, direct: Direct) -> None:
    encode = direct.tokenizer.encode
    context = sample["doc"]["context"]
    for ending, ((likelihood, is_greedy),) in zip(
        sample["doc"]["endings"], sample["resps"], strict=True
    ):
        ids, known = encode(context + ending), len(encode(context))
        expected = direct.likelihood(ids[:known], ids[known:])
        assert (float(likelihood), str(is_greedy) == "True") == expected


def check_text(sample: Sample, direct: Direct) -> None:
    ids = direct.tokenizer.encode(sample["doc"]["text"])
    expected = sum(direct.likelihood(*window)[0] for window in windows(ids))
    assert [float(value) for (value,) in sample["resps"]] == [expected]


def windows(ids: list[int]) -> list[tuple[list[int], list[int]]]:
    """Contexts and what is scored after them, as lm-eval cuts a long text."""
    size = MAX_LENGTH - 2
    found = [([START], ids[:size])]
    for begin in range(size, len(ids), size):
        scored = ids[begin : begin + size]
        end = begin + len(scored)
        found.append((ids[max(0, end - size - 1) : begin], scored))
    return found
