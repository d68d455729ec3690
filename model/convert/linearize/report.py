"""What a conversion has kept: ``report.json``, a table and ``report.svg``.

Four rows, each measured alike on the second halves of the validation texts: the source, the control
(the source with a window of equal memory in all layers, untrained), the converted model, and the
converted model without its far parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from model.convert.linearize import measure
from model.convert.linearize.scan import equal_window
from model.convert.linearize.student import Student
from model.files import read_json
from model.tokenizer import Tokenizer

SOURCE, CONTROL, CONVERTED, ABLATED = (
    *("source", "window of equal memory, untrained", "converted"),
    "converted, without far parts",
)


@dataclass(frozen=True)
class Measures:
    """How much is measured: ``pieces`` of ``length`` tokens of each text, ``recalls`` questions."""

    pieces: int = 4
    length: int = 2048
    recalls: int = 24
    distances: tuple[int, ...] = (30, 300, 900, 3000)


@dataclass(frozen=True)
class Subject:
    """What is measured: the student with trained weights, on ``texts`` by name."""

    student: Student
    tokenizer: Tokenizer
    texts: dict[str, Tensor]
    #: What is said of the conversion; another one makes new rows of the converted model.
    made: dict[str, Any]


def write_report(
    out: Path,
    subject: Subject,
    measures: Measures,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any] | None:
    """Measures the rows that ``report.json`` does not have yet; None where it was stopped."""
    student = subject.student
    source, shape = student.source, student.source.shape
    control = equal_window(student.plan, shape)
    size = student.plan.state_bytes(shape)
    path = out / "report.json"
    about = {
        **subject.made,
        "plan": student.plan.to_json(),
        "state_bytes": size,
        "control_window": control.layers[0].window,
        "measured": json.loads(json.dumps(asdict(measures))),
        "texts": {name: len(ids) for name, ids in subject.texts.items()},
    }
    rows: dict[str, Any] = {}
    if path.is_file():
        before = read_json(path)
        rows = before.pop("rows")
        if any(before[key] != about[key] for key in ("measured", "texts", "plan", "source")):
            rows = {}
        elif before != about:
            rows = {name: row for name, row in rows.items() if name in (SOURCE, CONTROL)}
    controlled = Student(source, control, {})

    def without_far(ids: Tensor) -> Tensor:
        student.with_far = False
        try:
            return student.hidden(ids)
        finally:
            student.with_far = True

    models = {
        SOURCE: (source.hidden, None),
        CONTROL: (controlled.hidden, control.state_bytes(shape)),
        CONVERTED: (student.hidden, size),
        ABLATED: (without_far, size),
    }
    for number, (name, (hidden, state_bytes)) in enumerate(models.items()):
        if name not in rows:
            if stop():
                return None
            rows[name] = {"state_bytes": state_bytes, **_row(hidden, subject, measures)}
        rows = {each: rows[each] for each in models if each in rows}
        text = json.dumps({**about, "rows": rows}, indent=1) + "\n"
        path.write_text(text, encoding="utf-8")
        progress(number + 1)
    report = {**about, "rows": rows}
    plot(report, out / "report.svg")
    return report


def _row(hidden: measure.Hidden, subject: Subject, measures: Measures) -> dict[str, Any]:
    head, sizes = subject.student.source.head, measure.token_bytes(subject.tokenizer)
    bits = {}
    for name, ids in subject.texts.items():
        pieces = measure.samples(ids, measures.pieces, measures.length)
        found = measure.bits_per_byte(hidden, head, pieces, sizes)
        by_position = {str(end): round(value, 4) for end, value in found.by_position.items()}
        bits[name] = {"all": round(found.all, 4), "by_position": by_position}
    filler, recalled = list(subject.texts.values())[-1], {}
    if measure.tells_colors_apart(subject.tokenizer):
        for distance in measures.distances:
            if distance < len(filler):
                told = measure.recall(
                    hidden, head, subject.tokenizer, filler, distance, measures.recalls
                )
                recalled[str(distance)] = round(told.accuracy, 3)
    return {"bits_per_byte": bits, "recall": recalled}


def print_report(report: dict[str, Any], console: Console) -> None:
    """The rows as a table; changes are relative to the source."""
    rows = report["rows"]
    texts, distances = rows[SOURCE]["bits_per_byte"], list(rows[SOURCE]["recall"])
    table = Table("", "state", *texts, *(f"recall at {distance}" for distance in distances))
    for name, row in rows.items():
        cells = []
        for text, bits in row["bits_per_byte"].items():
            change = bits["all"] / texts[text]["all"] - 1
            cells.append(f"{bits['all']:.4f}" + ("" if name == SOURCE else f" ({change:+.1%})"))
        cells += [f"{row['recall'][distance]:.2f}" for distance in distances]
        state = "grows" if name == SOURCE else f"{row['state_bytes'] / 1e6:.2f} MB"
        table.add_row(name, state, *cells)
    console.print(table)


def plot(report: dict[str, Any], path: Path) -> None:
    """Bits per byte over the source's by position, and recall by distance."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return  # the plot needs the extra 'train'; report.json holds the same numbers
    rows = report["rows"]
    texts = list(rows[SOURCE]["bits_per_byte"])
    figure = Figure(figsize=(4.5 * (len(texts) + 1), 4), layout="constrained")
    axes = figure.subplots(1, len(texts) + 1)
    for number, (name, row) in enumerate(rows.items()):
        style = {"color": f"C{number}", "marker": ".", "label": name}
        for place, text in zip(axes, texts, strict=False):
            source = rows[SOURCE]["bits_per_byte"][text]["by_position"]
            found = row["bits_per_byte"][text]["by_position"]
            changes = [100 * (found[end] / source[end] - 1) for end in source]
            place.plot(list(source), changes, **style)
            place.set(
                title=text, xlabel="up to position", ylabel="bits per byte, % over the source"
            )
        axes[-1].plot(list(row["recall"]), list(row["recall"].values()), **style)
    chance = 1 / len(measure.COLORS)
    axes[-1].axhline(chance, color="tab:gray", linestyle=":", label="guessing")
    axes[-1].set(title="recall of a told colour", xlabel="tokens ago", ylim=(0, 1.05))
    axes[-1].legend(fontsize="small")
    figure.savefig(path)
