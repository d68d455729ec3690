"""A contender in a process of its own, controlled over a pipe.

Requests and answers are lines of JSON; what a library prints goes to the log. Such a process runs
``python -m benchmarks.decode.worker NAME MODELS``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from benchmarks.decode.peers import CONTENDERS, Contender, Measured, Opened, Point, Unavailable
from benchmarks.decode.roofline import Cost
from benchmarks.process import MAX_LOG_CHARS, ROOT, Process


def make(name: str, models: Path) -> Contender:
    """The contender called ``name``, or MODULE:CLASS[:ARGUMENT]; its models lie in ``models``."""
    named = name.split(":")
    module, kind, arguments = (*named[:2], named[2:]) if named[1:] else CONTENDERS[name]
    contender: Contender = getattr(import_module(module), kind)(models, *arguments)
    return contender


def serve(contender: Contender, requests: IO[str], answers: IO[str]) -> None:
    """Answers requests until there are no more."""
    for line in requests:
        answer = _answer(contender, json.loads(line))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(contender: Contender, request: dict[str, Any]) -> dict[str, Any]:
    try:
        if "open" in request:
            return asdict(contender.open(Point(**request["open"])))
        return asdict(contender.run(request["run"]))
    except (Unavailable, ImportError) as reason:
        return {"unavailable": str(reason)}
    except Exception:
        return {"error": traceback.format_exc()}


class Worker(Process):
    """A `Contender` in a process that has ``threads`` threads, of the interpreter ``python``."""

    def __init__(
        self,
        name: str,
        models: Path,
        threads: int,
        python: Path = Path(sys.executable),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [str(python), "-m", "benchmarks.decode.worker", name, str(models)]
        own = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
        super().__init__(command, {**own, **(environment or {})})
        self._name = name

    def open(self, point: Point) -> Opened:
        answer = self._ask({"open": asdict(point)})
        return Opened(**{**answer, "cost": Cost(**answer["cost"])})

    def run(self, seconds: float) -> Measured:
        return Measured(**self._ask({"run": seconds}))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        line = b""
        with suppress(BrokenPipeError):
            self.requests.write(json.dumps(request).encode() + b"\n")
            self.requests.flush()
            line = self.output.readline()
        answer: dict[str, Any] = json.loads(line or '{"error": "it died"}')
        if "unavailable" in answer:
            raise Unavailable(answer["unavailable"])
        if "error" in answer:
            what = f"{answer['error']}\n{self.log()[-MAX_LOG_CHARS:]}"
            raise RuntimeError(f"{self._name} failed at {request}:\n{what}")
        return answer


def main() -> None:
    """The process of one contender."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    name, models = sys.argv[1:]
    serve(make(name, Path(models)), sys.stdin, answers)


if __name__ == "__main__":
    main()
