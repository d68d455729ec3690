"""A conversion from a source to a model of constant state: stages in one folder, each resumable.

OUT/conversion.json   what was asked for, which a later call must ask for too
OUT/cache/            ids of the texts; OUT/chats/ chats that the source wrote
OUT/scan.json         KL of each layer, where the plan is chosen by it; OUT/plan.json
OUT/runs/match/, OUT/runs/distil/    progress, log and adapter of the two stages of training
OUT/report.json, OUT/report.svg      what was kept (`.report`)
OUT/model/            the result

What a conversion takes follows from the sizes of the model: `memory`, and `hours` at measured
rates.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from model.convert.linearize.chats import (
    MAX_CHAT,
    ROWS,
    SHARD_CHATS,
    Writer,
    shard_tokens,
    write_chats,
    writing_runtime,
)
from model.convert.linearize.plan import (
    LlamaShape,
    Plan,
    choose_plan,
    given_bytes,
    given_plan,
    plan_from_json,
    sized_plan,
)
from model.convert.linearize.report import (
    Measures,
    Subject,
    bits_per_byte,
    half_ids,
    print_report,
    samples,
    token_bytes,
    write_report,
)
from model.convert.linearize.result import Adapter, save_adapter, write_adapter_folder, write_merged
from model.convert.linearize.sequences import (
    Sequences,
    Shares,
    Text,
    common_ids,
    read_shards,
    tokenized,
)
from model.convert.linearize.source import Source, matrix_sizes, read_source
from model.convert.linearize.student import MAX_BLOCK, Student
from model.convert.linearize.train import (
    Choice,
    Head,
    Meter,
    Options,
    Run,
    Schedule,
    Trainer,
    initialize,
    metered,
    scan_layers,
    scanned,
)
from model.evaluation import DataError, Half
from model.files import ConfigError, read_json
from model.native.runtime import built, num_cores, why_not_built
from model.training import TrainingError
from model.training.data import Source as DataSource
from model.training.loop import autocast_dtype, device_of

#: Ids that the loss of distillation is over.
HEAD_IDS = 16_384
SAVE_EVERY_S = 120.0
SCAN_PIECES = 2
#: Of both stages of training: peak rates, and the part of the steps in which they fall.
MATCH_RATE, UPDATE_RATE, FAR_RATE = 4e-2, 8e-4, 1e-3
MATCH_DECAY, DECAY = 0.4, 0.25
MATCH_CLIP = 5.0
#: Sequences of the second stage, in windows, each with its share. Without the longest, the model
#: gets worse beyond the length of its training.
LENGTHS = Choice((1, 2, 4), (0.6, 0.2, 0.2))
#: What the source sees at most, in windows, and as how far away the model sees the first tokens.
PAST = 2
#: What the windows of delta layers are cut to (0 for nothing), each with its share: their far parts
#: get work to do in short sequences. In the first stage only far parts learn, so that a whole ring
#: would teach theirs nothing.
MATCH_RINGS = Choice((64, 256), (0.5, 0.5))
RINGS = Choice((0, 64, 256), (0.7, 0.1, 0.2))
RANKS = {"qkv": 32, "out": 16}
#: All weights of a matrix are trained.
ALL = 0
DEFAULT_CHAT_TOKENS = 500_000

Stop = Callable[[], bool]


@dataclass(frozen=True)
class Settings:
    """What a user asks for; README.md in this folder has the reasons of the defaults."""

    source: str
    out: Path
    data: tuple[DataSource, ...]
    valid: tuple[Path, ...]
    #: Megabytes such as ``6mb``, or a JSON file of a plan.
    state: str | None = None
    #: None is `DEFAULT_CHAT_TOKENS` where the source can write chats.
    chat_tokens: int | None = None
    match_tokens: int = 50_000
    tokens: int = 1_000_000
    #: Of the updates of matrices, by name; None for all weights of all matrices.
    ranks: dict[str, int] | None = field(default_factory=lambda: dict(RANKS))
    #: What the second stage cuts rings to.
    rings: Choice = RINGS
    batch_size: int = 1
    #: Tokens of most sequences.
    window: int = 1024
    merged: bool = False
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    threads: int | None = None
    #: Steps between measurements.
    eval_every: int = 100
    measures: Measures | None = None

    def identity(self, digest: str) -> dict[str, Any]:
        """What a later call must agree with; it may ask for more tokens."""
        return {
            "source": digest,
            "data": [[text.path.name, text.weight] for text in self.data],
            "valid": [path.name for path in self.valid],
            "state": self.state,
            "match_tokens": self.match_tokens,
            "ranks": self.ranks or "all",
            "rings": [self.rings.values, self.rings.shares],
            "batch_size": self.batch_size,
            "window": self.window,
            "lengths": [LENGTHS.values, LENGTHS.shares],
            "seed": self.seed,
        }


class Conversion:
    """The folder of a conversion. The stages are to be called in their order.

    Each gives whether it is done; false where it was stopped, with all saved.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises `ConfigError`, `CheckpointError`, `DataError` or `TrainingError`."""
        self.settings = settings
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.device = device_of(settings.device)
        self.precision = autocast_dtype(settings.precision, self.device) or torch.float32
        self.source: Source = read_source(settings.source, self.precision)
        self.source.model.to(self.device)
        self.shape = self.source.model.shape
        self._check()
        self._record()

    def _check(self) -> None:
        settings, sizes = self.settings, matrix_sizes(self.shape)
        for name in ("batch_size", "window", "tokens", "match_tokens", "eval_every"):
            if (value := getattr(settings, name)) < 1:
                raise ConfigError(f"{name} must be 1 or more, not {value}")
        if settings.ranks is None and not settings.merged:
            raise ConfigError("all weights are trained (--ranks all): that needs --merged")
        for path in (*(text.path for text in settings.data), *settings.valid):
            if not path.is_file():
                raise DataError(f"{path} is not a file")
        assert self._valid  # which raises where a text is too short
        for name, rank in (settings.ranks or {}).items():
            if name not in sizes or type(rank) is not int or rank < 1:
                raise ConfigError(
                    f"--ranks must have positive integers of {', '.join(sizes)}, not {name}: {rank}"
                )
        if not settings.merged and not self.source.path.is_file():
            raise ConfigError("an adapter needs a GGUF file as its base: use --merged")
        if settings.chat_tokens and (reason := self._why_no_chats()):
            raise ConfigError(f"--chat-tokens must be 0: {reason}")
        most = self.source.config.max_context
        if settings.window > most:
            raise ConfigError(f"window must be at most {most}, which the source can see")
        plan = sized_plan(settings.state, self.shape, most)
        if (longest := max(layer.context for layer in plan.layers)) > most:
            raise ConfigError(
                f"--state has a layer that keeps {longest} tokens; the source can see {most}"
            )

    def _why_no_chats(self) -> str | None:
        if self.source.chat is None:
            return "the chat template is neither ChatML nor Llama 3's"
        return None if built() else f"chats need the native runtime: {why_not_built()}"

    def _record(self) -> None:
        path = self.settings.out / "conversion.json"
        identity = json.loads(json.dumps(self.settings.identity(self.source.digest)))
        if path.is_file():
            before = read_json(path)
            for name in identity | before:
                if identity.get(name) != before.get(name):
                    raise TrainingError(
                        f"{self.settings.out} holds a conversion with {name} {before.get(name)!r},"
                        f" not {identity.get(name)!r}: use another --out"
                    )
        self.settings.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")

    @property
    def chat_tokens(self) -> int:
        """Tokens of chats that the source writes."""
        if self.settings.chat_tokens is not None:
            return self.settings.chat_tokens
        return 0 if self._why_no_chats() else DEFAULT_CHAT_TOKENS

    @property
    def ranks(self) -> dict[str, int]:
        """Those of `Student`."""
        ranks = self.settings.ranks
        return dict.fromkeys(matrix_sizes(self.shape), ALL) if ranks is None else ranks

    @property
    def past(self) -> int:
        """Tokens that the source sees at most, and how far away the model sees first tokens."""
        past = min(PAST * self.settings.window, self.source.config.max_context)
        return max(past, *(layer.context for layer in self.plan.layers))

    def announcement(self) -> str:
        """What it will take and write."""
        settings, shape = self.settings, self.shape
        plan = sized_plan(settings.state, shape, self.source.config.max_context)
        size = self.source.model.layer(0).qkv.element_size()
        needed = memory(shape, plan, self.ranks, PAST * settings.window, size)
        chats = self._why_no_chats() or ""
        kind = "merged weights" if settings.merged else f"an adapter over {self.source.path.name}"
        return (
            f"memory: about {needed.most / 1e9:.1f} GB ({needed.source / 1e9:.2f} the source,"
            f" {needed.trained / 1e9:.2f} trained weights, {needed.step / 1e9:.2f} a step,"
            f" {needed.chats / 1e9:.2f} writing chats)\n"
            f"tokens: {self.chat_tokens:,} of chats{f' ({chats})' if chats else ''},"
            f" {settings.match_tokens:,} of matching, {settings.tokens:,} of distillation\n"
            f"state of a session: {plan.state_bytes(shape) / 1e6:.2f} MB\n"
            f"result: {settings.out / 'model'}, {kind}"
        )

    def write_chats(self, stop: Stop) -> bool:
        """The source writes chats."""
        folder, chat = self.settings.out / "chats", self.source.chat
        done = shard_tokens(folder)
        if done >= self.chat_tokens:
            return True
        assert chat is not None, "see _check"
        runtime = writing_runtime(self.source.checkpoint, self.settings.threads or num_cores())

        def writer(number: int) -> Writer:
            seed, first = self.settings.seed, number * SHARD_CHATS
            return Writer(runtime, self.source.tokenizer, chat, seed, first)

        with metered("chats", self.chat_tokens, done) as meter:
            return write_chats(folder, writer, self.chat_tokens, stop, meter.update)

    def choose_plan(self, stop: Stop) -> bool:
        """The plan that was given, or by the KL of each layer."""
        path = self.settings.out / "plan.json"
        if path.is_file():
            return True
        plan = given_plan(self.settings.state, self.shape)
        if plan is None:
            texts = [torch.from_numpy(text.ids.astype("int64")) for text in self._texts]
            window = self.settings.window
            pieces = [samples(ids, SCAN_PIECES, window) for ids in texts]
            layers, file = self.shape.num_layers, self.settings.out / "scan.json"
            done = len(scanned(file))
            with metered("scan", layers, done, "layers") as meter, self._autocast():
                kl = scan_layers(
                    self.source.model,
                    _stacked(pieces).to(self.device),
                    self._head.weight,
                    file,
                    stop,
                    meter.update,
                )
            if kl is None:
                return False
            max_bytes = given_bytes(self.settings.state, self.shape)
            plan = choose_plan(kl, self.shape, max_bytes, self.source.config.max_context)
        path.write_text(json.dumps(plan.to_json(), indent=1) + "\n", encoding="utf-8")
        return True

    @cached_property
    def plan(self) -> Plan:
        """What `choose_plan` wrote."""
        return plan_from_json(read_json(self.settings.out / "plan.json"))

    def match(self, stop: Stop) -> bool:
        """First stage: the far part of each layer learns what the source's attention gives."""
        settings = self.settings
        student = Student(self.source.model, self.plan, {}, self.past).to(self.device)
        options = Options(
            settings.seed,
            settings.batch_size,
            Choice((settings.window,), (1.0,)),
            MATCH_RINGS,
            clip=MATCH_CLIP,
        )
        trainer = self._trainer("match", student, options, settings.match_tokens, MATCH_DECAY)
        return self._train("match", trainer, trainer.match_step, settings.match_tokens, stop)

    def distil(self, stop: Stop) -> bool:
        """Second stage: far parts and updates learn the source's distributions."""
        settings = self.settings
        lengths = Choice(tuple(n * settings.window for n in LENGTHS.values), LENGTHS.shares)
        options = Options(settings.seed + 1, settings.batch_size, lengths, settings.rings)
        trainer = self._trainer("distil", self._student, options, settings.tokens, DECAY)
        head = self._head
        return self._train(
            "distil", trainer, lambda: trainer.distil_step(head), settings.tokens, stop
        )

    def report(self, stop: Stop) -> bool:
        """Measures the result next to the source and the control."""
        run = self._run("distil", self._student)
        made = {
            "source": self.source.path.name,
            "digest": self.source.digest,
            "tokens": run.num_tokens,
            "chat_tokens": shard_tokens(self.settings.out / "chats"),
            "precision": str(self.precision).removeprefix("torch."),
        }
        subject = Subject(self._student, self.source.tokenizer, self._valid["second"], made)
        measures = self.settings.measures or Measures(
            length=LENGTHS.values[-1] * self.settings.window
        )
        with metered("report", 4, 0, "rows") as meter, self._autocast():
            report = run.with_average(
                lambda: write_report(self.settings.out, subject, measures, stop, meter.update)
            )
        if report is None:
            return False
        print_report(report, Console())
        return True

    def write_model(self, stop: Stop) -> bool:
        """Writes the result."""
        run = self._run("distil", self._student)
        adapter = self._adapter(run, self._student)
        out = self.settings.out / "model"
        write = write_merged if self.settings.merged else write_adapter_folder
        write(out, adapter, self.source)
        return True

    @cached_property
    def _texts(self) -> list[Text]:
        cache, tokenizer = self.settings.out / "cache", self.source.tokenizer
        return [Text(tokenized(s.path, tokenizer, cache), s.weight) for s in self.settings.data]

    def _sequences(self, seed: int) -> Sequences:
        chats = read_shards(self.settings.out / "chats")
        source = self.source
        return Sequences(source.tokenizer, self._texts, chats, Shares(), seed, source.chat)

    @cached_property
    def _head(self) -> Head:
        path = self.settings.out / "cache" / f"head-{HEAD_IDS}.json"
        if not path.is_file():
            shards = [shard.ids for shard in read_shards(self.settings.out / "chats")]
            arrays = [*(text.ids for text in self._texts), *shards]
            ids = common_ids(arrays, self.source.tokenizer, HEAD_IDS)
            path.write_text(json.dumps(ids.tolist()), encoding="utf-8")
        ids = torch.tensor(json.loads(path.read_text(encoding="utf-8")), device=self.device)
        return Head(ids, self.source.model.head[ids])

    @cached_property
    def _valid(self) -> dict[Half, dict[str, Tensor]]:
        """Ids of the validation texts by name: a half to choose by, and one to report."""
        halves: tuple[Half, Half] = ("first", "second")
        paths, tokenizer = self.settings.valid, self.source.tokenizer
        return {
            half: {path.name: half_ids(path, tokenizer, half) for path in paths} for half in halves
        }

    @cached_property
    def _student(self) -> Student:
        student = Student(self.source.model, self.plan, self.ranks, self.past).to(self.device)
        generator = torch.Generator().manual_seed(self.settings.seed + 1)
        student.init_weights(generator)
        return student

    def _run(self, stage: str, student: Student) -> Run:
        folder = self.settings.out / "runs" / stage
        parameters = dict(student.named_parameters())
        rates = dict.fromkeys(parameters, MATCH_RATE)
        if stage == "distil":
            rates = {n: FAR_RATE if ".far." in n else self._update_rate for n in parameters}
        return Run(folder, parameters, rates, {"stage": stage, "plan": self.plan.to_json()})

    @property
    def _update_rate(self) -> float:
        """All weights of a matrix move by as much at a tenth of the rate of its low-rank update."""
        return UPDATE_RATE / 10 if self.settings.ranks is None else UPDATE_RATE

    def _trainer(
        self, stage: str, student: Student, options: Options, num_tokens: int, decay: float
    ) -> Trainer:
        run, lengths = self._run(stage, student), options.lengths
        if stage == "distil" and not run.step:
            matched = self._run("match", Student(self.source.model, self.plan, {}).to(self.device))
            initialize(run.parameters, matched.average)
            run.average = {name: p.detach().clone() for name, p in run.parameters.items()}
        mean = sum(n * share for n, share in zip(lengths.values, lengths.shares, strict=True))
        steps = max(1, round(num_tokens / (options.batch_size * mean)))
        return Trainer(
            student,
            run,
            self._sequences(options.seed),
            options,
            Schedule(steps, decay=int(decay * steps)),
            self.device,
            self.precision,
            past=self.past,
            longest_kept=PAST * self.settings.window,
        )

    def _train(
        self, stage: str, trainer: Trainer, step: Callable[[], None], num_tokens: int, stop: Stop
    ) -> bool:
        """Steps until the last one or a signal; what was done is saved."""
        run, saved = trainer.run, time.monotonic()
        with metered(stage, num_tokens, run.num_tokens) as meter:
            while run.step < trainer.schedule.steps:
                if stop():
                    self._save(trainer)
                    return False
                step()
                self._show(stage, trainer, meter)
                if time.monotonic() - saved > SAVE_EVERY_S:
                    self._save(trainer)
                    saved = time.monotonic()
        self._save(trainer)
        return True

    def _show(self, stage: str, trainer: Trainer, meter: Meter) -> None:
        run, last = trainer.run, trainer.schedule.steps
        text = None
        if stage == "distil" and (run.step % self.settings.eval_every == 0 or run.step == last):
            bits = run.with_average(self._quick)
            run.log(**bits)
            text = ", ".join(f"{name} {value:.4f} bits/byte" for name, value in bits.items())
        meter.update(run.num_tokens, text)

    def _quick(self) -> dict[str, float]:
        """Bits per byte of pieces of each validation text, of the halves that nothing reports."""
        sizes, found = token_bytes(self.source.tokenizer), {}
        with self._autocast():
            for name, ids in self._valid["first"].items():
                pieces = samples(ids, 2, self.settings.window)
                head = self.source.model.head
                bits = bits_per_byte(self._student.hidden, head, pieces, sizes)
                found[name] = round(bits.all, 4)
        return found

    def _save(self, trainer: Trainer) -> None:
        trainer.run.save()
        adapter = self._adapter(trainer.run, trainer.student)
        save_adapter(trainer.run.folder / "adapter.safetensors", adapter)

    def _adapter(self, run: Run, student: Student) -> Adapter:
        notes = {"step": run.step, "tokens": run.num_tokens}
        digest, ranks, farthest = self.source.digest, student.ranks, student.farthest
        return Adapter(digest, student.plan, ranks, farthest, run.average, notes)

    def _autocast(self) -> torch.autocast:
        low = self.precision != torch.float32
        return torch.autocast(self.device.type, self.precision, enabled=low)


def convert_to_constant(settings: Settings, stop: Stop, say: Callable[[str], None]) -> bool:
    """All stages in their order; false where ``stop`` said so, and the same call continues.

    Raises what `Conversion` raises.
    """
    conversion = Conversion(settings)
    say(conversion.announcement())
    stages = (
        conversion.write_chats,
        conversion.choose_plan,
        conversion.match,
        conversion.distil,
        conversion.report,
        conversion.write_model,
    )
    return all(stage(stop) for stage in stages)


def _stacked(pieces: list[Tensor]) -> Tensor:
    """Pieces of several texts [N, T] as one, cut to the shortest."""
    shortest = min(piece.shape[1] for piece in pieces)
    return torch.cat([piece[:, :shortest] for piece in pieces])


#: Bytes of a trained number: itself, its gradient, two moments of Adam and the average.
TRAINED_BYTES = 20
#: How often the backward pass needs features of a head.
FEATURE_COPIES = {"none": 0, "relative": 4, "delta": 8}
#: Next to what the backward pass needs, as measured with SmolLM2-135M.
TEMPORARY = 1.15
#: Of Python, torch and the texts.
PROGRAM_BYTES = 400 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes that the training takes, by part. Chats are written before it."""

    source: int
    trained: int
    step: int
    chats: int

    @property
    def most(self) -> int:
        """What is needed at once."""
        training = self.trained + self.step
        return PROGRAM_BYTES + self.source + max(training, self.chats)


def num_weights(shape: LlamaShape) -> int:
    """Numbers of the source's matrices, its embedding once."""
    layer = sum(rows * columns for rows, columns in matrix_sizes(shape).values())
    tables = shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)
    return shape.num_layers * layer + tables


def num_trained(shape: LlamaShape, plan: Plan, ranks: dict[str, int]) -> int:
    """Numbers that are trained."""
    sizes = matrix_sizes(shape)
    updates = sum(
        rank * sum(sizes[name]) if rank else sizes[name][0] * sizes[name][1]
        for name, rank in ranks.items()
    )
    width = shape.head_dim
    maps = sum(
        (shape.num_heads + shape.num_kv_heads) * width * layer.features // 2
        for layer in plan.layers
    )
    return shape.num_layers * updates + maps


def memory(
    shape: LlamaShape, plan: Plan, ranks: dict[str, int], length: int, matrix_bytes: int
) -> Memory:
    """That of training on sequences of up to ``length`` tokens, one at a time."""
    numbers, weights = 0.0, num_weights(shape)
    heads = shape.num_heads + 2 * shape.num_kv_heads
    for layer in plan.layers:
        # What the backward pass needs of a token: the inputs of all products, q, k and v before
        # and after their rotation, the share of each key that it sees, and the features.
        numbers += 4 * shape.hidden_size + 4 * heads * shape.head_dim + 3 * shape.intermediate_size
        # As far as tokens have more before them than the window.
        part = max(0.0, 1.0 - layer.window / length)
        seen = layer.window + min(layer.window, MAX_BLOCK) + plan.sinks
        far = FEATURE_COPIES[layer.far] * heads * layer.features
        numbers += part * (shape.num_heads * seen + far)
    past = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * (MAX_CHAT + 1)
    return Memory(
        source=weights * matrix_bytes,
        trained=num_trained(shape, plan, ranks) * TRAINED_BYTES,
        step=int(TEMPORARY * 4 * numbers * length),
        chats=2 * weights + 4 * ROWS * past,
    )


@dataclass(frozen=True)
class Rates:
    """Tokens per second of each stage, for a model of one weight."""

    chats: float
    match: float
    train: float


def _rates(chats: float, match: float, train: float) -> Rates:
    """From tokens per second of SmolLM2-135M."""
    weights = num_weights(SMOLLM2_135M)
    return Rates(chats * weights, match * weights, train * weights)


def hours(shape: LlamaShape, rates: Rates, chats: int, match: int, train: int) -> float:
    """Hours of so many tokens of each stage, in proportion to the weights that a token meets."""
    seconds = chats / rates.chats + match / rates.match + train / rates.train
    return num_weights(shape) * seconds / 3600


SMOLLM2_135M = LlamaShape(49152, 576, 30, 9, 3, 64, 1536, 1e5, 1e-5)
#: Measured in float32, in tokens per second of a core: 170 of chats, 170 of matching, 64 of KL.
TWO_CORES = _rates(2 * 170, 2 * 170, 2 * 64)
#: Not measured: a GPU that reaches 20 TFLOP/s is 290 such cores. Chats are written by 16 cores.
GPU = _rates(16 * 170, 290 * 170, 290 * 64)
#: Models whose costs the documentation has: their shapes from the published configs.
EXAMPLES = {
    "SmolLM2-135M": SMOLLM2_135M,
    "SmolLM2-360M": LlamaShape(49152, 960, 32, 15, 5, 64, 2560, 1e5, 1e-5),
    "Llama 3.2 1B": LlamaShape(128256, 2048, 16, 32, 8, 64, 8192, 5e5, 1e-5),
    "Qwen3 0.6B": LlamaShape(151936, 1024, 28, 16, 8, 128, 3072, 1e6, 1e-6, qk_norm=True),
}
