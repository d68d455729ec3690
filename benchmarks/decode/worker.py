"""A contender in a process of its own, which is told what to do over a pipe.

Requests and answers are lines of JSON; what a library prints goes to the log. Such a process runs
``python -m benchmarks.decode.worker NAME MODELS``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Self

from benchmarks.decode.peers import CONTENDERS, Contender, Measured, Opened, Point, Unavailable
from benchmarks.decode.roofline import Cost
from benchmarks.process import ROOT

MAX_LOG_CHARS = 4000


def make(name: str, models: Path) -> Contender:
    """The contender called ``name``, or MODULE:CLASS; its models lie in the folder ``models``."""
    module, kind, arguments = (*name.split(":"), ()) if ":" in name else CONTENDERS[name]
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


class Worker:
    """A `Contender` in a process that has ``threads`` threads, while the ``with`` block runs."""

    def __init__(self, name: str, models: Path, threads: int) -> None:
        self._name, self._models, self._threads = name, models, threads
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed in __exit__

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.decode.worker", self._name, str(self._models)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(self._threads), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            pipe.close()

    def open(self, point: Point) -> Opened:
        answer = self._ask({"open": asdict(point)})
        return Opened(**{**answer, "cost": Cost(**answer["cost"])})

    def run(self, seconds: float) -> Measured:
        return Measured(**self._ask({"run": seconds}))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            line = ""
        else:
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} died at {request}:\n{self._read_log()}")
        answer: dict[str, Any] = json.loads(line)
        if "unavailable" in answer:
            raise Unavailable(answer["unavailable"])
        if "error" in answer:
            what = f"{answer['error']}\n{self._read_log()}"
            raise RuntimeError(f"{self._name} failed at {request}:\n{what}")
        return answer

    def _read_log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-MAX_LOG_CHARS:]


def main() -> None:
    """The process of one contender."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    name, models = sys.argv[1:]
    serve(make(name, Path(models)), sys.stdin, answers)


if __name__ == "__main__":
    main()
