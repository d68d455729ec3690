"""The commands of a conversion. All read and write the folder ``WORK``; README.md has their order.

WORK/source/*.gguf      the model to convert
WORK/texts/*.txt        books and stories to train on
WORK/cache/*.u16        their ids
WORK/chats/*.npz        chats that the source wrote
WORK/runs/NAME/         a run of `match` or `distil`: progress, log, adapter
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from torch import Tensor

from model.architectures.llama.config import LlamaConfig
from model.convert.linearize import measure, train
from model.convert.linearize.adapter import Adapter, load_adapter, save_adapter, save_folder
from model.convert.linearize.chats import Sampling, Writer, write_shard
from model.convert.linearize.network import Llama
from model.convert.linearize.plan import Plan, plan_from_json, smollm2_plan, window_plan
from model.convert.linearize.run import Run, initialize
from model.convert.linearize.sequences import (
    Ids,
    Sequences,
    Shares,
    common_ids,
    read_shards,
    tokenized,
)
from model.convert.linearize.source import read_source
from model.convert.linearize.student import Student
from model.convert.linearize.talk import talk
from model.evaluation import Half
from model.files import read_json
from model.foreign import read_gguf
from model.hub.base import describe, file_digest
from model.hub.base_download import copy_verified
from model.tokenizer import Tokenizer
from model.training.signals import signals_remembered
from model.weights.gguf_file import GgufFile

BOOKS, STORIES = ("train_children", "train_fiction"), "simple_stories"
VALID = ("valid", "simple_stories_valid")
#: Ids that the loss of distillation is over.
HEAD_IDS = 16_384
SAVE_EVERY_S = 120.0
CPU = torch.device("cpu")
#: Tokens of a sequence, and what the windows of delta layers are cut to (0 for nothing), each with
#: its share: their far parts get work to do in short sequences. In the first stage only far parts
#: learn, so that a whole ring would teach theirs nothing.
LENGTHS = '{"1024": 0.85, "2048": 0.15}'
RINGS = '{"0": 0.7, "64": 0.1, "256": 0.2}'
MATCH_LENGTHS, MATCH_RINGS = '{"1024": 1.0}', '{"64": 0.5, "256": 0.5}'

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
WorkFolder = Annotated[Path, typer.Argument(help="Folder of the conversion.", exists=True)]
RunName = Annotated[str, typer.Option("--run", help="Name of the run.")]
PlanName = Annotated[
    str, typer.Option("--plan", help="What layers keep: 6mb, 3mb, or a JSON file of `Plan`.")
]
Steps = Annotated[int, typer.Option(help="Number of steps of the run, those before included.")]
BatchSize = Annotated[int, typer.Option(help="Sequences of a step.", min=1)]
Rows = Annotated[int, typer.Option(help="Sequences that are computed at a time.", min=1)]
Decay = Annotated[int, typer.Option(help="Last steps, of a falling rate.", min=0)]
Device = Annotated[str, typer.Option(help="Device: cpu or cuda.")]
Precision = Annotated[str, typer.Option(help="Of products: float32 or bfloat16.")]
Seconds = Annotated[float, typer.Option(help="End, with all saved, after so many seconds.")]
Seed = Annotated[int, typer.Option(help="Seed of the order of the data and of new weights.")]


@dataclass(frozen=True)
class Work:
    """The folder of a conversion, of which each part is read when it is asked for."""

    folder: Path
    device: torch.device = CPU

    @cached_property
    def base(self) -> Path:
        return next((self.folder / "source").glob("*.gguf"))

    @cached_property
    def _read(self) -> tuple[Llama, Tokenizer]:
        source, tokenizer = read_source(self.base)
        return source.to(self.device), tokenizer

    @property
    def source(self) -> Llama:
        return self._read[0]

    @property
    def tokenizer(self) -> Tokenizer:
        return self._read[1]

    @cached_property
    def texts(self) -> dict[str, Ids]:
        cache = self.folder / "cache"
        return {
            name: tokenized(self.folder / "texts" / f"{name}.txt", self.tokenizer, cache)
            for name in (*BOOKS, STORIES)
        }

    def sequences(self, shares: Shares, seed: int) -> Sequences:
        books = [self.texts[name] for name in BOOKS]
        chats = read_shards(self.folder / "chats")
        return Sequences(self.tokenizer, books, self.texts[STORIES], chats, shares, seed)

    def head(self) -> train.Head:
        path = self.folder / "cache" / f"head-{HEAD_IDS}.json"
        if not path.is_file():
            arrays = [*self.texts.values(), *(s.ids for s in read_shards(self.folder / "chats"))]
            ids = common_ids(arrays, self.source.shape.vocab_size, HEAD_IDS)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(ids.tolist()), encoding="utf-8")
        ids = torch.tensor(json.loads(path.read_text(encoding="utf-8")), device=self.device)
        return train.Head(ids, self.source.embedding[ids])

    def valid(self, half: Half) -> dict[str, Tensor]:
        return {
            name: measure.half_ids(self.folder / "texts" / f"{name}.txt", self.tokenizer, half)
            for name in VALID
        }

    def adapter(self, run: str) -> Adapter:
        return load_adapter(self.folder / "runs" / run / "adapter.safetensors")


@app.command()
def chats(
    work: WorkFolder,
    tokens: Annotated[int, typer.Option(help="Tokens to write.")],
    rows: Annotated[int, typer.Option(help="Chats that are written at a time.")] = 48,
    shard_tokens: Annotated[int, typer.Option(help="Tokens of a shard.")] = 20_000,
    temperature: Annotated[float, typer.Option(help="Temperature of the source.")] = 0.8,
    seconds: Seconds = 1e9,
    seed: Seed = 0,
    device: Device = "cpu",
) -> None:
    """The source writes chats, as further shards; at the end also those that are not finished."""
    folder, started, written = Work(work, torch.device(device)), time.monotonic(), 0
    number = len(read_shards(work / "chats"))
    seed += number  # else a second call would write the chats of the first
    writer = Writer(folder.source, folder.tokenizer, rows, seed, Sampling(temperature))
    finished: list[list[int]] = []

    def shard() -> None:
        nonlocal number, written
        path = work / "chats" / f"{number:05d}-{seed}.npz"
        write_shard(path, finished)
        written += sum(map(len, finished))
        number += 1
        rate = written / (time.monotonic() - started)
        typer.echo(f"{path.name}: {written} tokens in all, {rate:.0f} per second")
        finished.clear()

    with signals_remembered() as stop:
        while written < tokens and not stop() and time.monotonic() - started < seconds:
            finished += writer.step()
            if sum(map(len, finished)) >= shard_tokens:
                shard()
    finished += writer.unfinished()
    if finished:
        shard()


@app.command()
def match(
    work: WorkFolder,
    run: RunName,
    steps: Steps,
    plan: PlanName = "6mb",
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 4e-2,
    batch_size: BatchSize = 1,
    rows: Rows = 1,
    decay: Decay = 0,
    seconds: Seconds = 1e9,
    seed: Seed = 0,
    device: Device = "cpu",
    precision: Precision = "float32",
) -> None:
    """First stage: the far part of each layer learns what the source's attention gives."""
    folder = Work(work, torch.device(device))
    lengths, rings = _choice(MATCH_LENGTHS), _choice(MATCH_RINGS)
    options = train.Options(seed, batch_size, lengths, rings, clip=5.0)
    student = Student(folder.source, _plan(plan), {}).to(folder.device)
    parameters = dict(student.named_parameters())
    identity = {"stage": "match", "plan": student.plan.to_json(), "rate": rate, "seed": seed}
    trainer = train.Trainer(
        student,
        Run(work / "runs" / run, parameters, dict.fromkeys(parameters, rate), identity),
        folder.sequences(Shares(), seed),
        options,
        train.Schedule(steps, decay=decay),
        folder.device,
        getattr(torch, precision),
        rows,
    )
    _loop(folder, trainer, trainer.match_step, seconds, eval_every=0)


@app.command()
def distil(
    work: WorkFolder,
    run: RunName,
    steps: Steps,
    initial: Annotated[str, typer.Option(help="Run whose weights are the first.")] = "",
    plan: PlanName = "6mb",
    ranks: Annotated[str, typer.Option(help="Ranks of updates, as JSON.")] = '{"qkv":32,"out":16}',
    lora_rate: Annotated[float, typer.Option(help="Peak learning rate of updates.")] = 8e-4,
    far_rate: Annotated[float, typer.Option(help="Peak learning rate of far parts.")] = 1e-3,
    batch_size: BatchSize = 1,
    rows: Rows = 1,
    shares: Annotated[str, typer.Option(help="Shares of the data, as JSON.")] = "{}",
    lengths: Annotated[str, typer.Option(help="Shares of lengths, as JSON.")] = LENGTHS,
    rings: Annotated[str, typer.Option(help="Shares of shortened rings, as JSON.")] = RINGS,
    decay: Decay = 0,
    eval_every: Annotated[int, typer.Option(help="Steps between measurements.")] = 50,
    seconds: Seconds = 1e9,
    seed: Seed = 1,
    device: Device = "cpu",
    precision: Precision = "float32",
) -> None:
    """Second stage: far parts and low-rank updates learn the source's distributions."""
    folder = Work(work, torch.device(device))
    student = Student(folder.source, _plan(plan), json.loads(ranks)).to(folder.device)
    student.init_weights(torch.Generator().manual_seed(seed))
    parameters = dict(student.named_parameters())
    if initial:
        initialize(parameters, folder.adapter(initial).weights)
    identity = {
        "stage": "distil",
        "plan": student.plan.to_json(),
        "ranks": student.ranks,
        "rates": [lora_rate, far_rate],
        "initial": initial,
        "seed": seed,
    }
    rates = {name: far_rate if ".far." in name else lora_rate for name in parameters}
    trainer = train.Trainer(
        student,
        Run(work / "runs" / run, parameters, rates, identity),
        folder.sequences(Shares(**json.loads(shares)), seed),
        train.Options(seed, batch_size, _choice(lengths), _choice(rings)),
        train.Schedule(steps, decay=decay),
        folder.device,
        getattr(torch, precision),
        rows,
    )
    head = folder.head()
    _loop(folder, trainer, lambda: trainer.distil_step(head), seconds, eval_every)


def _choice(shares: str) -> train.Choice:
    """Of JSON: each value with its share."""
    values = {int(value): share for value, share in json.loads(shares).items()}
    return train.Choice(tuple(values), tuple(values.values()))


def _loop(
    folder: Work,
    trainer: train.Trainer,
    step: Callable[[], None],
    seconds: float,
    eval_every: int,
) -> None:
    """Steps until the last one, a signal, or the time; what was done is saved."""
    run, started = trainer.run, time.monotonic()
    saved = started
    with signals_remembered() as stop:
        while run.step < trainer.schedule.steps and not stop():
            step()
            if eval_every and run.step % eval_every == 0:
                run.log(**run.with_average(lambda: _quick(folder, trainer.student)))
            now = time.monotonic()
            if now - started > seconds:
                break
            if now - saved > SAVE_EVERY_S:
                _save(folder, run, trainer.student)
                saved = now
    _save(folder, run, trainer.student)


def _save(folder: Work, run: Run, student: Student) -> None:
    run.save()
    notes = {"step": run.step, "tokens": run.num_tokens}
    digest = file_digest(folder.base)
    adapter = Adapter(digest, student.plan, student.ranks, run.average, notes)
    save_adapter(run.folder / "adapter.safetensors", adapter)


def _quick(folder: Work, student: Student) -> dict[str, Any]:
    """Bits per byte of two pieces of each validation text, of the halves that nothing reports."""
    found = {}
    sizes = measure.token_bytes(folder.tokenizer)
    for name, ids in folder.valid("first").items():
        pieces = measure.samples(ids, 2, 1024)
        bits = measure.bits_per_byte(student.hidden, folder.source.embedding, pieces, sizes)
        found[name] = round(bits.all, 4)
    return found


@app.command()
def evaluate(
    work: WorkFolder,
    out: Annotated[Path, typer.Option(help="File of JSON lines that results are added to.")],
    run: Annotated[str, typer.Option(help="Run to measure; the source without one.")] = "",
    window: Annotated[int, typer.Option(help="Measure the source with such windows.")] = 0,
    plan: Annotated[str, typer.Option(help="Measure a plan as it is untrained.")] = "",
    far: Annotated[bool, typer.Option(help="Whether far parts are used.")] = True,
    count: Annotated[int, typer.Option(help="Pieces of each text.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a piece.")] = 2048,
    recalls: Annotated[int, typer.Option(help="Questions of each distance.")] = 24,
    distances: Annotated[str, typer.Option(help="Distances, separated by commas.")] = "30,300,900",
    device: Device = "cpu",
) -> None:
    """Bits per byte of the second halves of the validation texts, and recall by distance."""
    folder = Work(work, torch.device(device))
    hidden: measure.Hidden = folder.source.hidden
    if run or window or plan:
        student = _measured(folder, run, window, plan)
        student.with_far = far
        hidden = student.hidden
    head, sizes = folder.source.embedding, measure.token_bytes(folder.tokenizer)
    line: dict[str, Any] = {"run": run, "window": window, "plan": plan, "far": far}
    valid = folder.valid("second")
    for name, ids in valid.items():
        pieces = measure.samples(ids, count, length)
        bits = measure.bits_per_byte(hidden, head, pieces, sizes)
        line[name] = {"all": round(bits.all, 4)}
        line[name] |= {str(end): round(value, 4) for end, value in bits.by_position.items()}
        typer.echo(f"{name}: {line[name]}")
    for distance in (int(each) for each in distances.split(",") if each):
        found = measure.recall(hidden, head, folder.tokenizer, valid[VALID[1]], distance, recalls)
        line[f"recall_{distance}"] = [round(found.accuracy, 3), round(found.bits, 2)]
        typer.echo(f"recall {distance}: {line[f'recall_{distance}']}")
    line |= {"pieces": count, "length": length, "recalls": recalls, "time": time.ctime()}
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _measured(folder: Work, run: str, window: int, plan: str) -> Student:
    source = folder.source
    if run:
        return folder.adapter(run).student(source).to(folder.device)
    chosen = window_plan(source.shape.num_layers, window) if window else _plan(plan)
    return Student(source, chosen, {}).to(folder.device)


def _plan(name: str) -> Plan:
    """A plan by its name, or of a file."""
    path = Path(name)
    return plan_from_json(read_json(path)) if path.suffix == ".json" else smollm2_plan(name)


@app.command()
def adapter(
    work: WorkFolder,
    run: RunName,
    out: Annotated[Path, typer.Option(help="Folder to write; existing files are replaced.")],
    max_context: Annotated[
        int, typer.Option(help="How far away the first tokens are seen at most.")
    ] = 2048,
    wheel: Annotated[
        Path | None,
        typer.Option(help="Python wheel that has the source, for `everstream pull`.", exists=True),
    ] = None,
) -> None:
    """Write the model of a run as it is served: an adapter over the source."""
    folder = Work(work)
    trained = folder.adapter(run)
    base = describe(folder.base, wheel)
    if trained.base != base.sha256:
        raise typer.BadParameter(f"its base is not {base.file}", param_hint="--run")
    source, _ = read_gguf(GgufFile(folder.base), base.file)
    config = dataclasses.replace(
        cast("LlamaConfig", source), max_context=max_context, windows=trained.plan.layers
    )
    if wheel is not None:
        with tempfile.TemporaryFile() as copy:
            copy_verified(base, wheel, copy)  # which has the source, or this raises
    save_folder(out, trained, config, base)
    size = sum(file.stat().st_size for file in out.iterdir())
    typer.echo(f"{out}: {size:,} bytes")


@app.command()
def answers(
    work: WorkFolder,
    questions: Annotated[Path, typer.Option(help="JSON: lists of the user's messages.")],
    out: Annotated[Path, typer.Option(help="JSON file of the answers.")],
    run: Annotated[str, typer.Option(help="Run that answers; the source without one.")] = "",
    count: Annotated[int, typer.Option(help="Number of chats, from the first on.")] = 50,
    max_answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = 200,
    device: Device = "cpu",
) -> None:
    """Greedy answers to fixed chats."""
    folder = Work(work, torch.device(device))
    chats: list[list[str]] = json.loads(questions.read_text(encoding="utf-8"))[:count]
    # The source is a student whose windows no chat outgrows.
    student = _measured(folder, run, window=1280, plan="")
    dtype = torch.float16 if run else torch.float32
    given = talk(student, folder.tokenizer, chats, max_answer, dtype)
    lines = [
        {"questions": asked, "answers": answered}
        for asked, answered in zip(chats, given, strict=True)
    ]
    text = json.dumps({"run": run, "chats": lines}, indent=1, ensure_ascii=False)
    out.write_text(text + "\n", encoding="utf-8")
