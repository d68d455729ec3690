from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model.convert.linearize.plan import equal_window
from model.convert.linearize.report import (
    ABLATED,
    COLORS,
    CONTROL,
    CONVERTED,
    SOURCE,
    Measures,
    Subject,
    bits_per_byte,
    recall,
    samples,
    token_bytes,
    write_report,
)
from model.convert.linearize.student import Student
from tests.model.convert.linearize.tiny import BLOCK_PLAN, SHAPE, tiny_llama, tiny_tokenizer

COLOR_TOKENS = tuple(f" {color}" for color in COLORS)
MEASURES = Measures(pieces=2, length=150, recalls=4, distances=(60, 120, 3000))
#: Of the first tokens; the pieces are longer.
FARTHEST = 64
WIDE = replace(SHAPE, vocab_size=SHAPE.vocab_size + len(COLOR_TOKENS))


@pytest.fixture
def subject() -> Subject:
    tokenizer = tiny_tokenizer(COLOR_TOKENS)
    student = Student(tiny_llama(shape=WIDE), BLOCK_PLAN, {"qkv": 2}, FARTHEST)
    student.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.2 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(1)
            )
    text = torch.tensor(tokenizer.encode("The old clock told a story to the cat. " * 40))
    return Subject(student, tokenizer, {"book.txt": text}, {"source": "tiny.gguf", "tokens": 5})


def written(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return report


def test_each_row_is_measured_as_its_model(subject: Subject, tmp_path: Path) -> None:
    report = write_report(tmp_path, subject, MEASURES)
    assert report == written(tmp_path)
    rows, student = report["rows"], subject.student
    assert list(rows) == [SOURCE, CONTROL, CONVERTED, ABLATED]
    control = Student(student.source, equal_window(BLOCK_PLAN, WIDE), {}, FARTHEST)
    pieces = samples(subject.texts["book.txt"], 2, 150)
    for name, bounded, hidden in (
        (SOURCE, lambda ids: student.source.hidden(ids, FARTHEST), student.source.hidden),
        (CONTROL, control.hidden, control.hidden),
        (CONVERTED, student.hidden, student.hidden),
    ):
        bits = bits_per_byte(bounded, student.source.head, pieces, token_bytes(subject.tokenizer))
        found = rows[name]["bits_per_byte"]["book.txt"]
        assert found["all"] == round(bits.all, 4)
        assert found["by_position"] == {str(k): round(v, 4) for k, v in bits.by_position.items()}
        # No text is longer than 3,000 tokens.
        assert list(rows[name]["recall"]) == ["60", "120"]
        told = recall(
            hidden, student.source.head, subject.tokenizer, subject.texts["book.txt"], 120, 4
        )
        assert rows[name]["recall"]["120"] == told.accuracy
    assert rows[ABLATED]["bits_per_byte"] != rows[CONVERTED]["bits_per_byte"]
    assert student.with_far
    assert rows[SOURCE]["state_bytes"] is None
    assert rows[CONTROL]["state_bytes"] >= rows[CONVERTED]["state_bytes"] == report["state_bytes"]
    assert report["state_bytes"] == BLOCK_PLAN.state_bytes(WIDE)
    assert (report["source"], report["tokens"]) == ("tiny.gguf", 5)
    drawn = (tmp_path / "report.svg").read_text(encoding="utf-8")
    for word in (CONTROL, "book.txt", "recall of a told colour"):
        assert word in drawn


def test_stopped_report_keeps_its_rows_and_a_longer_run_measures_its_own_again(
    subject: Subject, tmp_path: Path
) -> None:
    asked = iter([False, False, True])
    assert write_report(tmp_path, subject, MEASURES, lambda: next(asked)) is None
    assert list(written(tmp_path)["rows"]) == [SOURCE, CONTROL]
    whole = write_report(tmp_path, subject, MEASURES)

    with torch.no_grad():
        for parameter in subject.student.parameters():
            parameter += 0.1
    assert write_report(tmp_path, subject, MEASURES) == whole  # nothing is measured twice
    longer = replace(subject, made={**subject.made, "tokens": 9})
    changed = write_report(tmp_path, longer, MEASURES)
    assert whole is not None
    assert changed is not None
    for name in (SOURCE, CONTROL):
        assert changed["rows"][name] == whole["rows"][name]
    for name in (CONVERTED, ABLATED):
        assert changed["rows"][name] != whole["rows"][name]


def test_recall_is_left_out_where_colours_begin_alike(subject: Subject, tmp_path: Path) -> None:
    alike = replace(subject, tokenizer=tiny_tokenizer())
    report = write_report(tmp_path, alike, MEASURES)
    assert report is not None
    assert report["rows"][SOURCE]["recall"] == {}
