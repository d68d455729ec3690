"""Tokens/s of Everstream, llama.cpp, ik_llama.cpp, OpenVINO GenAI and vLLM, in turns.

    python -m benchmarks.peers --environments FOLDER --models FOLDER
    python -m benchmarks.peers --environments FOLDER --models FOLDER --model qwen35 --keep

The bundled chat model, whose state is constant, runs next to its original: the same file in our
runtime and in the peers', but for vLLM, which has its weights in bfloat16. RWKV-7 and Qwen3.5 have
random weights in published shapes, one GGUF file for all. At each point all take turns for several
rounds, each in a process of its own; a figure is the median of its rounds. The second one measures
one model again and keeps the rows of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Self

from benchmarks.checkpoints import chat, hybrids, shapes
from benchmarks.decode.peers import Measured, Opened, Point, Unavailable
from benchmarks.decode.report import RAW, figures_of, measure
from benchmarks.decode.roofline import Rates
from benchmarks.decode.worker import Worker
from benchmarks.machine import machine
from benchmarks.peers.environments import PEERS, preloaded, python_of
from benchmarks.process import exit_on_sigterm
from benchmarks.report import RESULTS, Figures, Result, command_line, read_result

#: Of a processor without AMX, and of one with it.
RESULT = RESULTS / "peers.json"
WITH_AMX = RESULTS / "peers_amx.json"
OURS = "Everstream"
#: Of the original of the chat model in our runtime.
ORIGINAL = "Everstream, original"
HERE = "benchmarks.peers"
MAX_REASON = 200  # characters
CHECKPOINTS = "benchmarks.checkpoints"
VLLM = {"vLLM": "bfloat16"}


@dataclass(frozen=True)
class Model:
    """What is measured: its points, and who loads it by which class.

    Who is in ``only`` takes part with weights of that type alone.
    """

    size: str
    dtypes: tuple[str, ...]
    contexts: tuple[int, ...]
    contenders: Mapping[str, str]
    only: Mapping[str, str]


MODELS = {
    "smollm2": Model(
        chat.SIZE,
        ("int4", "int8", "bfloat16"),
        (0, 4096, 32768),
        {
            OURS: f"{CHECKPOINTS}.contenders:Chat",
            ORIGINAL: f"{HERE}.ours:Original",
            "llama.cpp": f"{CHECKPOINTS}.llama:Chat",
            "ik_llama.cpp": f"{HERE}.ik:contender:Chat",
            "OpenVINO": f"{HERE}.openvino:OpenVino:chat",
            "vLLM": f"{HERE}.vllm:Vllm:chat",
        },
        # The file is in 4 bits.
        {**dict.fromkeys((ORIGINAL, "llama.cpp", "ik_llama.cpp", "OpenVINO"), "int4"), **VLLM},
    ),
    "qwen35": Model(
        "qwen35-0.8B",
        ("bfloat16", "int8", "int4"),
        (0,),
        {
            OURS: f"{CHECKPOINTS}.contenders:HybridFromFile",
            "llama.cpp": f"{CHECKPOINTS}.llama:HybridFromFile",
            "ik_llama.cpp": f"{HERE}.ik:contender:HybridFromFile",
            "OpenVINO": f"{HERE}.openvino:OpenVino:hybrid",
            "vLLM": f"{HERE}.vllm:Vllm:hybrid",
        },
        VLLM,
    ),
    "rwkv7": Model(
        "0.4B",
        ("bfloat16", "int8", "int4"),
        (0,),
        {
            OURS: f"{CHECKPOINTS}.contenders:FromFile",
            "llama.cpp": f"{CHECKPOINTS}.llama:FromFile",
            "ik_llama.cpp": f"{HERE}.ik:contender:FromFile",
            "OpenVINO": f"{HERE}.openvino:OpenVino:rwkv7",
            "vLLM": f"{HERE}.vllm:Vllm:rwkv7",
        },
        VLLM,
    ),
}
FILES = {"qwen35": hybrids.file_of, "rwkv7": shapes.file_of, "smollm2": chat.file_of}


class Restarted:
    """A `Worker` that is started again after it died: a reason to leave that point out."""

    def __init__(self, start: Callable[[], Worker]) -> None:
        self._start = start
        self._worker: Worker | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._worker is not None:
            self._worker.__exit__()
            self._worker = None

    def open(self, point: Point) -> Opened:
        """Starts it, unless it runs. Raises `Unavailable`, also where it fails."""
        if self._worker is None:
            self._worker = self._start().__enter__()
        try:
            return self._worker.open(point)
        except RuntimeError as error:
            raise self._failed(error) from error

    def run(self, seconds: float) -> Measured:
        """Raises `Unavailable` where it fails."""
        assert self._worker is not None
        try:
            return self._worker.run(seconds)
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: RuntimeError) -> Unavailable:
        self.__exit__()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Unavailable(_shortest(lines))


def _shortest(lines: Sequence[str]) -> str:
    """Of what a process left behind, the error that it names, or its last words."""
    named = [line for line in lines if "rror" in line.partition(":")[0] or "ASSERT" in line]
    return (named or lines)[-1].partition(". ")[0][:MAX_REASON]


def points(model: Model, options: argparse.Namespace) -> Iterator[Point]:
    """What to measure of ``model``."""
    for dtype, context in product(model.dtypes, model.contexts):
        for streams in options.streams:
            yield Point(model.size, dtype, streams, context, options.threads)
        if not context:
            yield Point(model.size, dtype, 1, 0, options.threads, "prefill")


def measure_all(options: argparse.Namespace, models: Path) -> Iterator[Figures]:
    """A row of figures for each point of each model."""
    rates = Rates()
    for name in options.model:
        model = MODELS[name]
        for dtype in model.dtypes:
            FILES[name](models, model.size, dtype)  # before it is measured
        with ExitStack() as stack:
            workers = {}
            missing = {}
            for who, contender in model.contenders.items():
                if who not in options.contender:
                    continue
                python = _python(options.environments, who)
                if python is None:
                    missing[who] = "not installed"
                    continue
                start = partial(
                    Worker, contender, models, options.threads, python, _variables(options, who)
                )
                workers[who] = stack.enter_context(Restarted(start))
            for point in points(model, options):
                there = {
                    who: worker
                    for who, worker in workers.items()
                    if model.only.get(who, point.dtype) == point.dtype
                }
                found = measure(point, there, rates, options.rounds, options.seconds)
                found.skipped |= missing
                row = figures_of(found, (OURS, ORIGINAL))
                for contender in row["contenders"].values():
                    for raw in RAW:
                        del contender[raw]
                print(json.dumps(row), file=sys.stderr, flush=True)
                yield row


def _python(environments: Path, who: str) -> Path | None:
    return python_of(environments, who) if who in PEERS else Path(sys.executable)


def _variables(options: argparse.Namespace, who: str) -> dict[str, str]:
    if who == "vLLM":
        return {"LD_PRELOAD": preloaded(options.environments)}
    return {"GGML_NO_BACKTRACE": "1"}


def arguments(command: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, RESULT)
    everybody = list(dict.fromkeys(name for of in MODELS.values() for name in of.contenders))
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--contender", nargs="+", choices=everybody, default=everybody)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of each turn")
    parser.add_argument("--environments", type=Path, required=True, help="folder of the peers")
    parser.add_argument("--models", type=Path, help="folder to keep the files in between runs")
    parser.add_argument("--keep", action="store_true", help="keep the rows of other models")
    return parser.parse_args(command)


def kept(options: argparse.Namespace) -> Figures:
    """The rows of the output that are of other models, and the commands that gave them.

    Ends with an error where those were measured on another machine or for another time.
    """
    if not options.keep:
        return {"rows": []}
    before, here = read_result(options.output), machine()
    wanted = (options.rounds, options.seconds, here["cpu"], here["cores"])
    on = before["machine"]
    if (before["rounds"], before["seconds"], on["cpu"], on["cores"]) != wanted:
        sys.exit(f"--keep: {options.output} has other rounds, seconds or another machine")
    sizes = {MODELS[name].size for name in options.model}
    rows = [row for row in before["rows"] if row["size"] not in sizes]
    return {
        "earlier_commands": [*before.get("earlier_commands", []), before["command"]],
        "rows": rows,
    }


def main(command: Sequence[str] | None = None) -> None:
    """Measures, and ends with the line of JSON."""
    exit_on_sigterm()
    options = arguments(command)
    result, earlier = Result("peers", options.output), kept(options)
    figures = {"rounds": options.rounds, "seconds": options.seconds, **earlier}
    with tempfile.TemporaryDirectory() as folder:
        for row in measure_all(options, options.models or Path(folder)):
            figures["rows"] = [*figures["rows"], row]
            result.save(figures)
    result.finish(figures)


if __name__ == "__main__":
    main()
