"""The benchmark of drafts: texts are said to the letter, at the cost of the model that is timed."""

from __future__ import annotations

import itertools
import json

import pytest

from benchmarks.report import RESULTS, read_result
from benchmarks.speculation.__main__ import Bench, Round, gains, in_turn
from benchmarks.speculation.texts import NUM_RECORDS, SCHEMA, Text, records, story, texts
from benchmarks.studies.pages.speculation import TEXTS, tables
from server.engine.drafts import DraftCosts, SuffixDrafter
from server.models.backend import open_backend
from tests.requirements import needs_native
from tests.tiny import tiny_checkpoint, tiny_tokenizer

FREE = DraftCosts((1.0, 1.0, 1.0, 1.0, 1.0))


@needs_native
@pytest.mark.parametrize("num_streams", [1, 3])
def test_given_text_is_said_with_and_without_drafts(num_streams: int) -> None:
    bench = Bench(open_backend(tiny_checkpoint(), "native", threads=1))
    passage = list(range(20, 60))
    text = Text("a", [5, 6, *passage, 7], [*passage, *passage])
    seconds, usage = bench.run(text, None, num_streams)
    assert seconds > 0
    assert (usage.completion_tokens, usage.accepted_tokens) == (len(text.answer), 0)
    _, usage = bench.run(text, SuffixDrafter(FREE, tiny_tokenizer().token_bytes), num_streams)
    assert usage.completion_tokens == len(text.answer)
    assert usage.accepted_tokens > 50
    assert usage.rejected_tokens < 15


def test_what_becomes_slower_all_the_time_does_so_for_both_kinds() -> None:
    """Each run takes a second longer than the one before it, whichever it is."""
    clock = itertools.count(1)
    calls: list[str] = []

    def run(kind: str) -> float:
        calls.append(kind)
        return float(next(clock))

    rounds = [in_turn(lambda: run("plain"), lambda: run("drafted"), odd) for odd in (False, True)]
    assert calls == [
        *("plain", "drafted", "drafted", "plain"),
        *("drafted", "plain", "plain", "drafted"),
    ]
    assert rounds == [Round((1, 4), (2, 3)), Round((6, 7), (5, 8))]
    assert gains(rounds)["speedups"] == [1.0, 1.0]


def test_gains_are_medians_with_their_spread() -> None:
    rounds = [Round((2.0, 2.0), (1.0, 1.0)), Round((2.0, 2.2), (2.0, 2.0)), Round((3, 3), (1, 1))]
    figures = gains(rounds)
    assert figures["speedups"] == [1.05, 2.0, 3.0]
    assert (figures["speedup"], figures["plain_ms"], figures["drafted_ms"]) == (2.0, 2100.0, 1000.0)
    assert figures["equal_runs"] == 1.0
    assert gains(rounds[1:2])["equal_runs"] == 1.05


@needs_native
def test_texts_are_what_their_names_say() -> None:
    rows = json.loads(records())
    assert len(rows) == NUM_RECORDS
    assert all(list(row) == list(SCHEMA["properties"]) for row in rows)
    made = texts(tiny_tokenizer(), 40)
    assert tuple(text.name for text in made) == TEXTS
    assert all(len(text.answer) == 40 for text in made)
    assert story().startswith("Once upon a time")
    plain, rewritten, in_json = made
    assert tiny_tokenizer().decode([*plain.prompt, *plain.answer]) in story()
    assert "Anna" in tiny_tokenizer().decode(rewritten.answer)
    assert records().startswith(tiny_tokenizer().decode(in_json.answer))


def test_table_has_every_shape_of_the_results() -> None:
    shapes = read_result(RESULTS / "speculation.json")["shapes"]
    lines = tables()["speculation"].splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == list(shapes)
