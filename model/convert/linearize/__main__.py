"""Measures of a conversion, and its costs: `python -m model.convert.linearize`.

An adapter here is ``adapter.safetensors`` of a run (`model.convert.linearize.result`).
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from model.convert.linearize.chats import ChatFormat, encode
from model.convert.linearize.conversion import (
    DEFAULT_CHAT_TOKENS,
    EXAMPLES,
    GPU,
    PAST,
    RANKS,
    TWO_CORES,
    Settings,
    hours,
    memory,
)
from model.convert.linearize.plan import sized_plan, window_plan
from model.convert.linearize.report import Measures, Subject, half_ids, print_report, write_report
from model.convert.linearize.result import Adapter, load_adapter, write_adapter_folder
from model.convert.linearize.source import Source, read_source
from model.convert.linearize.student import Student, empty_state, step
from model.files import ConfigError
from model.hub.base import copy_verified, describe
from model.tokenizer import Tokenizer

#: Tokens of an answer.
MAX_ANSWER = 200


@dataclass
class _Chat:
    """One chat: ``feed`` are tokens still to be read, ``answer`` those of the answer so far."""

    questions: list[str]
    feed: list[int]
    answer: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


def talk(
    student: Student,
    tokenizer: Tokenizer,
    form: ChatFormat,
    chats: list[list[str]],
    max_answer: int = MAX_ANSWER,
    dtype: torch.dtype = torch.float16,
) -> list[list[str]]:
    """The answers to each question of each chat, in the order of the questions.

    ``dtype`` is that of keys and values. All chats are rows of one batch.
    """
    end = tokenizer.special_ids[form.end]
    begin = [form.system + form.turn("user", chat[0]) + form.assistant for chat in chats]
    rows = [_Chat(chat, encode(tokenizer, text)) for chat, text in zip(chats, begin, strict=True)]
    state = empty_state(student, len(rows), dtype)
    head = student.source.head
    while any(row.feed for row in rows):
        # A chat that is over reads something, which nothing depends on.
        ids = torch.tensor([row.feed.pop(0) if row.feed else end for row in rows])
        drawn = (step(student, state, ids.to(head.device)) @ head.t()).argmax(dim=-1).tolist()
        for row, id in zip(rows, drawn, strict=True):
            if row.feed or len(row.answers) == len(row.questions):
                continue
            if id != end and len(row.answer) < max_answer:
                row.answer.append(id)
                row.feed = [id]
                continue
            row.answers.append(row.answer)
            row.answer = []
            if len(row.answers) < len(row.questions):
                following = form.turn("user", row.questions[len(row.answers)])
                text = form.end + form.after_end + following + form.assistant
                row.feed = encode(tokenizer, text)
    return [[tokenizer.decode(answer) for answer in row.answers] for row in rows]


app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
SourceName = Annotated[str, typer.Argument(help="GGUF file, folder or hub id of the source.")]
AdapterFile = Annotated[
    Path | None, typer.Option("--adapter", help="Adapter; the source without one.", exists=True)
]
Device = Annotated[str, typer.Option(help="Device: cpu or cuda.")]


@app.command()
def report(
    source: SourceName,
    adapter: Annotated[Path, typer.Argument(help="Adapter of a run.", exists=True)],
    out: Annotated[Path, typer.Argument(help="Folder of report.json and report.svg.")],
    valid: Annotated[list[Path], typer.Option(help="UTF-8 text; repeat.", exists=True)],
    pieces: Annotated[int, typer.Option(help="Pieces of each text.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a piece.")] = 4096,
    recalls: Annotated[int, typer.Option(help="Questions of each distance.")] = 24,
    device: Device = "cpu",
) -> None:
    """Measure an adapter next to its source and the control, as `everstream convert` does."""
    read, loaded = _read(source, adapter)
    student = loaded.student(read.model.to(device)).to(device)
    texts = {path.name: half_ids(path, read.tokenizer, "second") for path in valid}
    made = {"source": read.path.name, "digest": read.digest, **loaded.notes}
    out.mkdir(parents=True, exist_ok=True)
    subject = Subject(student, read.tokenizer, texts, made)
    if found := write_report(out, subject, Measures(pieces, length, recalls)):
        print_report(found, Console())


def cost_table() -> str:
    """Memory and hours of `EXAMPLES` with the options of `everstream convert` by default."""
    lines = [
        "| model | state | memory in float32, bfloat16 | two cores | a GPU |",
        "|---|---|---|---|---|",
    ]
    for name, shape in EXAMPLES.items():
        plan = sized_plan(None, shape)
        full, low = (
            memory(shape, plan, RANKS, PAST * Settings.window, size).most / 1e9 for size in (4, 2)
        )
        tokens = DEFAULT_CHAT_TOKENS, Settings.match_tokens, Settings.tokens
        cores, gpu = (hours(shape, rates, *tokens) for rates in (TWO_CORES, GPU))
        size = plan.state_bytes(shape) / 1e6
        needed = f"{full:.1f} GB, {low:.1f} GB"
        lines.append(f"| {name} | {size:.1f} MB | {needed} | {cores:.0f} h | {gpu:.1f} h |")
    return "\n".join(lines)


@app.command()
def costs() -> None:
    """The table of docs/contribute/convert-llama.md, computed."""
    typer.echo(cost_table())


@app.command("adapter")
def write_adapter(
    source: SourceName,
    adapter: Annotated[Path, typer.Argument(help="Adapter of a run.", exists=True)],
    out: Annotated[Path, typer.Argument(help="Folder to write; existing files are replaced.")],
    wheel: Annotated[
        Path | None,
        typer.Option(help="Python wheel that has the source, for `everstream pull`.", exists=True),
    ] = None,
) -> None:
    """Write the model of a run as it is served: an adapter over the source."""
    read, trained = _read(source, adapter)
    if wheel is not None:
        with tempfile.TemporaryFile() as copy:
            # Which has the source, or this raises.
            copy_verified(describe(read.path, wheel), wheel, copy)
    write_adapter_folder(out, trained, read, wheel)
    size = sum(file.stat().st_size for file in out.iterdir())
    typer.echo(f"{out}: {size:,} bytes")


def _read(source: str, adapter: Path) -> tuple[Source, Adapter]:
    """Raises `ConfigError` where the adapter is over another source."""
    read, loaded = read_source(source), load_adapter(adapter)
    if loaded.base != read.digest:
        raise ConfigError(f"{adapter} is not over {read.path.name}: the base's hash differs")
    return read, loaded


@app.command()
def answers(
    source: SourceName,
    questions: Annotated[Path, typer.Option(help="JSON: lists of the user's messages.")],
    out: Annotated[Path, typer.Option(help="JSON file of the answers.")],
    adapter: AdapterFile = None,
    count: Annotated[int, typer.Option(help="Number of chats, from the first on.")] = 50,
    max_answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = MAX_ANSWER,
    device: Device = "cpu",
) -> None:
    """Greedy answers to fixed chats."""
    read = read_source(source)
    if read.chat is None:
        raise ConfigError(f"{read.path.name} has no chat template that is ChatML or Llama 3's")
    model = read.model.to(device)
    chats: list[list[str]] = json.loads(questions.read_text(encoding="utf-8"))[:count]
    # The source is a student whose windows no chat outgrows.
    student = (
        load_adapter(adapter).student(model)
        if adapter
        else Student(model, window_plan(model.shape.num_layers, 1280), {})
    ).to(device)
    dtype = torch.float16 if adapter else torch.float32
    given = talk(student, read.tokenizer, read.chat, chats, max_answer, dtype)
    lines = [
        {"questions": asked, "answers": answered}
        for asked, answered in zip(chats, given, strict=True)
    ]
    values = {"adapter": adapter.name if adapter else None, "chats": lines}
    text = json.dumps(values, indent=1, ensure_ascii=False)
    out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
