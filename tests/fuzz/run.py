"""Hands changed files to a child, one after the other, and says which of them have fallen."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from random import Random
from threading import Thread
from types import TracebackType
from typing import Any, Self

from model.files import MAX_MESSAGE
from tests.fuzz.files import FORMATS, Format, write_all
from tests.fuzz.mutations import change

#: Guards against a hang; a file takes milliseconds.
TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Case:
    """A file, or a folder of files, and what reads it."""

    entry: str
    path: str
    about: dict[str, Any]


@dataclass
class Verdict:
    """What came of many files."""

    counts: Counter[str] = field(default_factory=Counter)
    fallen: list[str] = field(default_factory=list)


class Child:
    """`tests.fuzz.child`, started again after a case that ended it."""

    def __init__(self, warm: list[Case]) -> None:
        self._warm = warm
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def attempt(self, case: Case) -> tuple[str, str]:
        """What came of it: ``loaded``, ``refused``, or ``fell`` with what happened."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps(asdict(case)) + "\n")
        stdin.flush()
        answer = self._answer()
        if answer is None:
            self._process.kill()
            status, said = self._end(), self._errors.read_text(errors="replace")[-3000:]
            self._start()
            return "fell", f"no answer within {TIMEOUT_S:g} s, or status {status}: {said}"
        return answer

    def _start(self) -> None:
        self._errors = Path(self._warm[0].about["errors"])
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-B", "-m", "tests.fuzz.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._answers: SimpleQueue[str] = SimpleQueue()
        self._reader = Thread(target=self._read, args=(self._process.stdout, self._answers))
        self._reader.start()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([asdict(case) for case in self._warm]) + "\n")
        self._process.stdin.flush()
        for case in self._warm:  # good files load
            found = self._answer()
            assert found == ("loaded", ""), (case.path, found, self._errors.read_text())

    @staticmethod
    def _read(stdout: Any, answers: SimpleQueue[str]) -> None:
        for line in stdout:
            answers.put(line)
        answers.put("")

    def _answer(self) -> tuple[str, str] | None:
        try:
            line = self._answers.get(timeout=TIMEOUT_S)
        except Empty:
            return None
        if not line:
            return None
        what, message = json.loads(line)
        return what, message

    def _end(self) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        status = self._process.wait()
        self._reader.join()
        self._process.stdout.close()
        return status


class Fuzz:
    """Good files under ``folder``, and a child that has read them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.abouts = folder, write_all(folder)
        warm = [self._case(folder / each.name, each) for each in FORMATS]
        warm[0].about["errors"] = str(folder / "errors")
        self.child = Child(warm)

    def attempt(self, format: Format, seed: int) -> tuple[str, str]:
        """What came of the files of ``format``, changed by ``seed``."""
        random = Random(f"{format.name} {seed}")
        folder = self.copy(format)
        for _ in range(random.choice((1, 1, 1, 2))):
            files = sorted(path for path in folder.iterdir() if path.is_file())
            if files:
                change(random.choice(files), random)
        return self.read(format, folder)

    def copy(self, format: Format) -> Path:
        """The good files of a format, to be changed."""
        folder = self.folder / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder / format.name, folder)
        return folder

    def read(self, format: Format, folder: Path) -> tuple[str, str]:
        """What came of the files in ``folder``; a message that is not clear has fallen."""
        what, message = self.child.attempt(self._case(folder, format))
        if what == "refused" and (wrong := _unclear(message, folder, format)):
            return "fell", f"{wrong}: {message[:2000]!r}"
        return what, message

    def _case(self, folder: Path, format: Format) -> Case:
        return Case(format.entry, str(folder / format.path), dict(self.abouts[format.name]))


def _unclear(message: str, folder: Path, format: Format) -> str | None:
    """What is wrong with a message."""
    if not message.isprintable():
        return "not one line"
    if len(message) > MAX_MESSAGE + 100:
        return "too long"
    names = [path.name for path in folder.iterdir()]
    names += [str(folder), "generation_config.json", "rwkv_vocab", "model.safetensors"]
    if format.entry != "session" and not any(name in message for name in names):
        return "names no file"
    return None


def seeds(first: int, count: int) -> Iterator[tuple[Format, int]]:
    """Every format in turn."""
    for seed in range(first, first + count):
        for format in FORMATS:
            yield format, seed


def run(
    fuzz: Fuzz, cases: Iterator[tuple[Format, int]], tell: Callable[[str], None] | None = None
) -> Verdict:
    """Tries the cases; ``tell`` is called with what has fallen."""
    verdict = Verdict()
    for format, seed in cases:
        what, message = fuzz.attempt(format, seed)
        verdict.counts[f"{format.name} {what}"] += 1
        if what == "fell":
            verdict.fallen.append(f"{format.name}, seed {seed}: {message}")
            if tell is not None:
                tell(verdict.fallen[-1])
    return verdict
