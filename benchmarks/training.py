"""How fast a training step is: fused against the definitions, and where its time goes.

``python -m benchmarks.training`` trains models of 6M parameters on the text of ``docs/`` for a few
steps each, with the kernels of `model.ops.fused` and without them, taking turns. It writes
``benchmarks/results/training.json``; ``python -m benchmarks.studies.pages`` puts that into
``docs/contribute/training.md``.

Besides tokens per second there are tokens per second of processor time, which other work on the
machine disturbs less. A step counts 6 operations per token and parameter of a matrix product, the
head included and the attention's own products not.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from benchmarks.process import ROOT
from benchmarks.report import RESULTS, Figures, Result, command_line
from model.config import ModelConfig
from model.memory import keep_freed_memory
from model.ops.fused import without_kernels
from model.tokenizer import Tokenizer, train_tokenizer
from model.training.data import Source
from model.training.loop import Run, TrainConfig

RESULT = RESULTS / "training.json"
ATTENTIONS = ("delta", "gated", "elu", "vq", "softmax")
PRECISIONS = ("bfloat16", "float32")
VOCABULARY, BATCH_SIZE, WINDOW, CURVE_STEPS = 4096, 8, 512, 100
#: Sides of the product whose rate counts as the machine's.
PEAK_SIDE = 1024
#: The parts of a step by the names of torch's operations, the first that fits.
PARTS = (
    ("products", ("aten::mm", "aten::addmm")),
    ("attention", ("Delta", "aten::bmm", "aten::baddbmm", "_scaled_dot", "aten::linalg")),
    ("convolution", ("Convolution", "aten::conv", "aten::mkldnn_conv", "aten::thnn_conv")),
    ("norms", ("Norm", "AddNorm", "GatedNorm", "aten::_fused_rms_norm")),
    ("MLP element-wise", ("Swiglu",)),
    ("loss", ("_LinearCrossEntropy",)),
    ("casts and copies", ("aten::copy_", "aten::_to_copy", "aten::cat", "aten::clone")),
    ("other element-wise", ("aten::",)),
)


def main() -> None:
    """Measures, writes the result and prints it."""
    options = arguments()
    result = Result("training", options.output)
    keep_freed_memory()
    torch.set_num_threads(1)  # next to the threads of `Shares`
    pages = sorted((ROOT / "docs").rglob("*.md"))
    with TemporaryDirectory() as folder:
        bench = Bench(Path(folder), "\n".join(page.read_text(encoding="utf-8") for page in pages))
        figures: Figures = {"rounds": options.rounds}
        figures["peak_gflops"] = peaks(options.threads)
        figures["profile"] = [bench.parts("delta", fused) for fused in (True, False)]
        figures["speed"] = [
            bench.speed(attention, precision, threads, options.rounds)
            for attention in options.attention
            for precision in options.precision
            for threads in options.threads
        ]
        figures["curves"] = [bench.curves(name, options.curve_steps) for name in PRECISIONS]
    result.finish(figures)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, RESULT)
    parser.add_argument("--attention", nargs="+", default=list(ATTENTIONS))
    parser.add_argument("--precision", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3, help="steps of each form, in turn")
    parser.add_argument("--curve-steps", type=int, default=CURVE_STEPS)
    return parser.parse_args()


class Bench:
    """The text, its tokenizer, and runs on them."""

    def __init__(self, folder: Path, text: str) -> None:
        self.folder, self.count = folder, 0
        self.text = folder / "text.txt"
        self.text.write_text(text, encoding="utf-8")
        self.tokenizer: Tokenizer = train_tokenizer([self.text], VOCABULARY)

    @contextmanager
    def run(
        self, attention: str, precision: str, threads: int = 1, steps: int = 1000
    ) -> Iterator[Run]:
        """A run of its own folder, closed afterwards."""
        self.count += 1
        config = TrainConfig(
            data=(Source(self.text),),
            out=self.folder / str(self.count),
            num_steps=steps,
            batch_size=BATCH_SIZE,
            window=WINDOW,
            warmup_steps=10,
            precision=precision,
            threads=threads,
        )
        config.out.mkdir()
        model = ModelConfig(
            vocab_size=self.tokenizer.vocab_size,
            hidden_size=256,
            num_hidden_layers=6,
            num_attention_heads=4,
            head_dim=64,
            intermediate_size=640,
            attention=attention,
        )
        run = Run(config, model, self.tokenizer)
        try:
            yield run
        finally:
            run.close()

    def speed(self, attention: str, precision: str, threads: int, rounds: int) -> Figures:
        """Steps with the kernels and with the definitions, taking turns."""
        with self.run(attention, precision, threads) as run:
            flops = 6.0 * matrix_parameters(run.model) * BATCH_SIZE * WINDOW
            seconds: dict[str, list[tuple[float, float]]] = {"fused": [], "reference": []}
            for turn in range(rounds + 1):  # the first warms up
                for form, taken in seconds.items():
                    with nullcontext() if form == "fused" else without_kernels():
                        found = timed(run.train_step)
                    if turn:
                        taken.append(found)
        result: Figures = {"attention": attention, "precision": precision, "threads": threads}
        for form, taken in seconds.items():
            wall, cpu = (median(column) for column in zip(*taken, strict=True))
            result[form] = {
                "tokens_per_s": round(BATCH_SIZE * WINDOW / wall),
                "tokens_per_cpu_s": round(BATCH_SIZE * WINDOW / cpu),
                "gflops": round(flops / wall / 1e9, 1),
                "gflops_per_cpu": round(flops / cpu / 1e9, 1),
            }
        print(json.dumps(result), file=sys.stderr, flush=True)
        return result

    def parts(self, attention: str, fused: bool) -> Figures:
        """Milliseconds of a step's parts on one thread in bfloat16."""
        settings = _ExperimentalConfig(profile_all_threads=True)
        with self.run(attention, "bfloat16") as run, nullcontext() if fused else without_kernels():
            run.train_step()
            with profile(activities=[ProfilerActivity.CPU], experimental_config=settings) as found:
                run.train_step()
        milliseconds: dict[str, float] = defaultdict(float)
        for event in found.events():
            milliseconds[part_of(event)] += event.self_cpu_time_total / 1e3
        form = "fused" if fused else "reference"
        rounded = {part: round(value, 1) for part, value in milliseconds.items()}
        return {"attention": attention, "form": form, "milliseconds": rounded}

    def curves(self, precision: str, steps: int) -> Figures:
        """The losses of delta in both forms on the same tokens."""
        losses: dict[str, list[float]] = {}
        for form in ("fused", "reference"):
            with (
                self.run("delta", precision, steps=steps) as run,
                nullcontext() if form == "fused" else without_kernels(),
            ):
                for _ in range(steps):
                    run.train_step()
            with (run.config.out / "log.csv").open(encoding="utf-8") as file:
                losses[form] = [float(row["loss"]) for row in csv.DictReader(file)]
        return {"attention": "delta", "precision": precision, **losses}


def matrix_parameters(model: nn.Module) -> int:
    """Of matrices that tokens are multiplied with; the embedding counts as the head."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock and of the processors."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def peaks(threads: list[int]) -> Figures:
    """GFLOP/s of a product of torch by precision: a thread's on its own processor, and all."""
    result: Figures = {}
    for precision in PRECISIONS:
        side = torch.ones(PEAK_SIDE, PEAK_SIDE, dtype=getattr(torch, precision))

        def products(side: torch.Tensor = side) -> tuple[float, float]:
            torch.set_num_threads(1)
            times = 40
            start = time.perf_counter(), time.thread_time()
            for _ in range(times):
                side @ side
            flops = 2.0 * PEAK_SIDE**3 * times / 1e9
            return flops / (time.perf_counter() - start[0]), flops / (time.thread_time() - start[1])

        for number in threads:
            with ThreadPoolExecutor(number) as pool:
                found = [
                    future.result() for future in [pool.submit(products) for _ in range(number)]
                ]
            result.setdefault(precision, {})[str(number)] = {
                "wall": round(sum(wall for wall, _ in found), 1),
                "cpu": round(sum(cpu for _, cpu in found) / number, 1),
            }
    return result


def part_of(event: Any) -> str:
    """The part of `PARTS` to which a profiled operation belongs."""
    ancestor = event
    while ancestor is not None:
        if str(ancestor.name).startswith("Optimizer"):
            return "optimizer"
        ancestor = ancestor.cpu_parent
    name = str(event.name)
    return next((part for part, starts in PARTS if name.startswith(starts)), "autograd and rest")


if __name__ == "__main__":
    main()
