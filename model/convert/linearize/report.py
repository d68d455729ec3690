"""What a conversion has kept: ``report.json``, a table and ``report.svg``.

Four rows, measured on the second halves of the validation texts: the source, the control (the
source with a window of equal memory in all layers, untrained), the converted model, and the
converted model without its far parts. Each has bits per byte, for which the source sees no more
than in training, and recall of a told fact by distance, for which it sees all. A model is here a
function from ids [B, T] to the input of the head [B, T, D].
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from model.convert.linearize.plan import equal_window
from model.convert.linearize.sequences import separator
from model.convert.linearize.student import Student
from model.evaluation import DataError, Half, documents
from model.files import read_json
from model.tokenizer import Tokenizer

Hidden = Callable[[Tensor], Tensor]
#: The least tokens of a half of a validation text.
MIN_TOKENS = 64
#: Rows of the head's logits at a time.
ROWS = 256
#: Positions at which a bin of `bits_by_position` ends.
BINS = (64, 256, 1024, 2048, 4096)

COLORS = ("red", "blue", "green", "yellow", "black", "white", "pink", "brown")
NAMES = ("Anna", "Tom", "Lucy", "Peter", "Mary", "Sam", "Emma", "Jack")


@dataclass(frozen=True)
class Bits:
    """Bits per byte of sequences from the empty state: of all tokens, and by position (`BINS`)."""

    all: float
    by_position: dict[int, float]


def half_ids(file: Path, tokenizer: Tokenizer, half: Half) -> Tensor:
    """Ids of the first half of a validation text, to choose by, or of the second, to report.

    Raises `DataError` where they are fewer than `MIN_TOKENS`.
    """
    ids: list[int] = []
    for text in documents(file, half):
        ids += [*tokenizer.encode(text), separator(tokenizer)]
    if len(ids) < MIN_TOKENS:
        raise DataError(f"{file}: its {half} half has {len(ids)} tokens, of at least {MIN_TOKENS}")
    return torch.tensor(ids)


def samples(ids: Tensor, count: int, num_tokens: int) -> Tensor:
    """``count`` pieces of ``num_tokens`` ids at even distances, or of all where it is fewer."""
    num_tokens = min(num_tokens, len(ids))
    starts = torch.linspace(0, len(ids) - num_tokens, count).long()
    return torch.stack([ids[start : start + num_tokens] for start in starts])


@torch.no_grad()
def bits_per_byte(hidden: Hidden, head: Tensor, ids: Tensor, num_bytes: Tensor) -> Bits:
    """Of ``ids`` [N, T], each row a text from the empty state; ``num_bytes`` are of each id."""
    nats = torch.stack([_nats(hidden(row[None])[0], head, row) for row in ids.to(head.device)])
    sizes = num_bytes[ids[:, 1:]].double().to(head.device)

    def bits(part: slice) -> float:
        total = nats[:, part].sum() / math.log(2)
        return float(total / sizes[:, part].sum().clamp_min(1.0))

    ends = [0, *(end for end in BINS if end < ids.shape[1]), ids.shape[1]]
    by_position = {b: bits(slice(a, b - 1)) for a, b in pairwise(ends)}
    return Bits(bits(slice(None)), by_position)


def _nats(hidden: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    """-log p [T - 1] of each id but the first, float64."""
    parts = []
    for start in range(0, len(ids) - 1, ROWS):
        end = min(start + ROWS, len(ids) - 1)
        log_p = (hidden[start:end] @ head.t()).log_softmax(dim=-1)
        parts.append(-log_p.gather(1, ids[start + 1 : end + 1, None])[:, 0])
    return torch.cat(parts).double()


def token_bytes(tokenizer: Tokenizer) -> Tensor:
    """Bytes of each id; special ids have none."""
    sizes = [len(tokenizer.token_bytes(id)) for id in range(tokenizer.vocab_size)]
    for id in tokenizer.special_names:
        sizes[id] = 0
    return torch.tensor(sizes)


def tells_colors_apart(tokenizer: Tokenizer) -> bool:
    """Whether the first ids of the colours differ, which `recall` compares."""
    return len(set(color_ids(tokenizer))) == len(COLORS)


@dataclass(frozen=True)
class Question:
    """Asks for a favourite colour: ids of the text that tells it, and of the one that asks."""

    told: list[int]
    asked: list[int]
    color: int
    #: Where the other text between the two begins, as a part of all places.
    place: float

    def between(self, filler: list[int], distance: int) -> list[int]:
        """Ids of ``filler`` so that the question ends ``distance`` tokens behind the fact."""
        length = distance - len(self.asked)
        start = int(self.place * (len(filler) - length))
        return filler[start : start + length]


def questions(tokenizer: Tokenizer, count: int) -> Iterator[Question]:
    """``count`` of them, always the same; a guess is right one time in eight."""
    rng = np.random.default_rng(0)
    begin = tokenizer.encode("Here is a list of facts and a story.\n\n")
    for number in range(count):
        name, color = NAMES[number % len(NAMES)], int(rng.integers(len(COLORS)))
        fact = tokenizer.encode(f"{name}'s favorite color is {COLORS[color]}.\n\n")
        asked = tokenizer.encode(f"\n\n{name}'s favorite color is")
        yield Question([*begin, *fact], asked, color, rng.random())


def color_ids(tokenizer: Tokenizer) -> list[int]:
    """The first id of each colour, as it comes after a question."""
    return [tokenizer.encode(f" {color}")[0] for color in COLORS]


@dataclass(frozen=True)
class Recall:
    """Of a told colour: how often it is the first of the eight, and the mean log2 of its share."""

    accuracy: float
    bits: float
    count: int


@torch.no_grad()
def recall(
    hidden: Hidden, head: Tensor, tokenizer: Tokenizer, filler: Tensor, distance: int, count: int
) -> Recall:
    """Asks ``count`` times for a favourite colour that was told ``distance`` tokens before.

    ``filler`` are ids of other text.
    """
    colors = torch.tensor(color_ids(tokenizer), device=head.device)
    other = filler.tolist()
    right, bits = 0, 0.0
    for question in questions(tokenizer, count):
        text = [*question.told, *question.between(other, distance), *question.asked]
        last = hidden(torch.tensor([text], device=head.device))[0, -1]
        log_p = (head[colors] @ last).log_softmax(dim=-1)
        right += int(log_p.argmax() == question.color)
        bits += float(log_p[question.color]) / math.log(2)
    return Recall(right / count, bits / count, count)


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
        "farthest": student.farthest,
        "measured": json.loads(json.dumps(asdict(measures))),
        "texts": {name: len(ids) for name, ids in subject.texts.items()},
    }
    rows: dict[str, Any] = {}
    if path.is_file():
        before = read_json(path)
        rows = before.pop("rows")
        kept = ("measured", "texts", "plan", "source", "farthest")
        if any(before.get(key) != about[key] for key in kept):
            rows = {}
        elif before != about:
            rows = {name: row for name, row in rows.items() if name in (SOURCE, CONTROL)}
    controlled = Student(source, control, {}, student.farthest)

    def bounded(ids: Tensor) -> Tensor:
        return source.hidden(ids, student.farthest)

    def without_far(ids: Tensor) -> Tensor:
        student.with_far = False
        try:
            return student.hidden(ids)
        finally:
            student.with_far = True

    # What bits per byte are measured of, and what recalls: the source with all of its past.
    models: dict[str, tuple[Hidden, Hidden, int | None]] = {
        SOURCE: (bounded, source.hidden, None),
        CONTROL: (controlled.hidden, controlled.hidden, control.state_bytes(shape)),
        CONVERTED: (student.hidden, student.hidden, size),
        ABLATED: (without_far, without_far, size),
    }
    for number, (name, (hidden, recalls, state_bytes)) in enumerate(models.items()):
        if name not in rows:
            if stop():
                return None
            rows[name] = {"state_bytes": state_bytes, **_row(hidden, recalls, subject, measures)}
        rows = {each: rows[each] for each in models if each in rows}
        text = json.dumps({**about, "rows": rows}, indent=1) + "\n"
        path.write_text(text, encoding="utf-8")
        progress(number + 1)
    report = {**about, "rows": rows}
    plot(report, out / "report.svg")
    return report


def _row(hidden: Hidden, recalls: Hidden, subject: Subject, measures: Measures) -> dict[str, Any]:
    head, sizes = subject.student.source.head, token_bytes(subject.tokenizer)
    bits = {}
    for name, ids in subject.texts.items():
        pieces = samples(ids, measures.pieces, measures.length)
        found = bits_per_byte(hidden, head, pieces, sizes)
        by_position = {str(end): round(value, 4) for end, value in found.by_position.items()}
        bits[name] = {"all": round(found.all, 4), "by_position": by_position}
    filler, recalled = list(subject.texts.values())[-1], {}
    if tells_colors_apart(subject.tokenizer):
        for distance in measures.distances:
            if distance < len(filler):
                told = recall(recalls, head, subject.tokenizer, filler, distance, measures.recalls)
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
    chance = 1 / len(COLORS)
    axes[-1].axhline(chance, color="tab:gray", linestyle=":", label="guessing")
    axes[-1].set(title="recall of a told colour", xlabel="tokens ago", ylim=(0, 1.05))
    axes[-1].legend(fontsize="small")
    figure.savefig(path)
