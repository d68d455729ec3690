"""What the tests notice: small errors put into the code, one at a time, and the tests that fail.

    python -m tests.tools.mutations                                    # all, as a table
    python -m tests.tools.mutations --only server/store model          # those of some folders
    python -m tests.tools.mutations --worth tests/server/test_x.py::test_y tests/server/test_z.py

`mutations.toml` lists the mutations: a file, a text that occurs in it once and what takes its
place, in groups with the tests that are run. Everything happens in a copy of the tree; a compiled
native runtime is copied along, so a mutation of C++ shows nothing. A mutation that no test
notices has survived; one whose text the file no longer has is stale, and either is an error.

With ``--worth`` the tests named there run with every chosen mutation too. The second table then
says of each how many mutations it notices and which no other test notices: what would be lost
without it. ``--results FILE`` keeps what was found and runs no mutation again that is in the
file; remove it after a change of the code or the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LIST = Path(__file__).with_name("mutations.toml")
#: What the copy of the tree does without.
LEFT_OUT = (".git", ".venv", "__pycache__", "node_modules", ".hypothesis", ".*_cache", "results")
TEST_TIMEOUT_S = 60
RUN_TIMEOUT_S = 900
#: Names of tests that the table shows of each mutation.
NUM_SHOWN = 2


@dataclass(frozen=True)
class Mutation:
    """``text`` occurs once in ``file`` and is replaced; ``tests`` are the files that are run."""

    file: str
    text: str
    becomes: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.file}: {self.text} => {self.becomes}"


@dataclass(frozen=True)
class Result:
    """``failed`` are tests as file::name, their cases counted as one; or what went wrong."""

    failed: tuple[str, ...]
    seconds: float
    problem: str = ""

    @property
    def is_noticed(self) -> bool:
        return bool(self.failed) or self.problem == "hangs"


def read_mutations(path: Path, only: Sequence[str] = ()) -> list[Mutation]:
    """Those of a file of TOML; with ``only``, those below one of these folders or files."""
    groups = tomllib.loads(path.read_text("utf-8"))["group"]
    found = [
        Mutation(*row, tuple(group["tests"])) for group in groups for row in group["mutations"]
    ]
    return [m for m in found if not only or any(is_below(m.file, part) for part in only)]


def is_below(place: str, part: str) -> bool:
    """Whether ``place``, a file or a test, is ``part`` or lies in it."""
    return place == part or place.startswith((part.rstrip("/") + "/", f"{part}::"))


def mutated(source: str, mutation: Mutation) -> str | None:
    """None where the text is not there, or not once."""
    if source.count(mutation.text) != 1:
        return None
    return source.replace(mutation.text, mutation.becomes)


class Tree:
    """A copy of the working tree in which tests run."""

    def __init__(self, root: Path) -> None:
        self._root = root
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*LEFT_OUT))
        self._num_written = 0

    def run(self, tests: Iterable[str]) -> Result:
        """The tests that fail."""
        report = self._root / "report.xml"
        report.unlink(missing_ok=True)
        options = ["-q", "--tb=no", f"--timeout={TEST_TIMEOUT_S}", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *tests]
        begun = time.monotonic()
        try:
            done = subprocess.run(
                command,
                check=False,
                cwd=self._root,
                env={**os.environ, "PYTHONPATH": str(self._root)},
                capture_output=True,
                text=True,
                timeout=RUN_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return Result((), RUN_TIMEOUT_S, "hangs")
        seconds = time.monotonic() - begun
        failed = failed_tests(report.read_text("utf-8")) if report.exists() else ()
        if done.returncode > 1 and not failed:
            return Result((), seconds, f"pytest: {(done.stderr or done.stdout).strip()[-300:]}")
        return Result(failed, seconds)

    def run_mutated(self, mutation: Mutation, tests: Iterable[str]) -> Result:
        """The tests that fail because of ``mutation``, which is undone."""
        path = self._root / mutation.file
        before = path.read_text("utf-8") if path.exists() else ""
        text = mutated(before, mutation)
        if text is None:
            return Result((), 0.0, "stale")
        try:
            self._write(path, text)
            return self.run(tests)
        finally:
            self._write(path, before)

    def _write(self, path: Path, text: str) -> None:
        """With a time of its own: compiled modules are told apart by that and their size."""
        path.write_text(text, "utf-8")
        self._num_written += 1
        os.utime(path, (self._num_written, self._num_written))


def failed_tests(report: str) -> tuple[str, ...]:
    """The tests that failed in a report of JUnit's form, as file::name, without their cases."""
    failed: dict[str, None] = {}
    for case in ET.fromstring(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            # A file that could not be collected has no class.
            place = case.get("classname") or case.get("name") or ""
            name = (
                "" if not case.get("classname") else "::" + (case.get("name") or "").split("[")[0]
            )
            failed[f"{place.replace('.', '/')}.py{name}"] = None
    return tuple(failed)


def table(found: Sequence[tuple[Mutation, Result]]) -> Iterator[str]:
    """A row for each mutation, as Markdown."""
    yield "| file | mutation | tests that fail | s |"
    yield "|---|---|---|---|"
    for mutation, result in found:
        names = [test.rpartition("::")[2] for test in result.failed]
        shown = ", ".join(f"`{name}`" for name in names[:NUM_SHOWN])
        more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
        noticed = shown + more or result.problem or "**none**"
        change = f"{_code(mutation.text)} becomes {_code(mutation.becomes)}"
        yield f"| `{mutation.file}` | {change} | {noticed} | {result.seconds:.0f} |"


def worth(found: Sequence[tuple[Mutation, Result]], tests: Sequence[str]) -> Iterator[str]:
    """What each of ``tests`` notices, and what only it, and what only all of them together."""
    yield "| test | notices | only it notices |"
    yield "|---|---|---|"
    for name, parts in [*((test, [test]) for test in tests), ("all of these", list(tests))]:
        by_test = [
            (mutation, [any(is_below(failed, part) for part in parts) for failed in result.failed])
            for mutation, result in found
        ]
        only = [mutation for mutation, own in by_test if own and all(own)]
        shown = "; ".join(f"`{m.file}`: {_code(m.becomes)}" for m in only) or "nothing"
        yield f"| `{name}` | {sum(any(own) for _, own in by_test)} | {shown} |"


def _code(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return f"`{line}`" if line else "nothing"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.mutations")
    parser.add_argument("--only", nargs="+", default=[], help="folders or files of the mutations")
    parser.add_argument("--worth", nargs="+", default=[], help="tests to judge, by node id")
    parser.add_argument("--results", type=Path, help="a JSON file of what was found, kept up")
    asked = parser.parse_args(arguments)
    mutations = read_mutations(LIST, asked.only)
    known: dict[str, dict[str, object]] = {}
    if asked.results is not None and asked.results.exists():
        known = json.loads(asked.results.read_text("utf-8"))
    found: list[tuple[Mutation, Result]] = []
    with tempfile.TemporaryDirectory() as folder:
        tree: Tree | None = None
        for number, mutation in enumerate(mutations, 1):
            tests = [*dict.fromkeys((*mutation.tests, *asked.worth))]
            key = f"{mutation.name} by {' '.join(tests)}"
            if key in known:
                row = known[key]
                found.append((mutation, Result(**{**row, "failed": tuple(row["failed"])})))  # type: ignore[arg-type]
                continue
            if tree is None:
                tree = Tree(Path(folder) / "tree")
                named = {test for m in mutations for test in (*m.tests, *asked.worth)}
                if (healthy := tree.run(sorted(named))).failed or healthy.problem:
                    print("these fail without a mutation:", *healthy.failed, healthy.problem)
                    return 1
            result = tree.run_mutated(mutation, tests)
            found.append((mutation, result))
            known[key] = asdict(result)
            if asked.results is not None:
                asked.results.write_text(json.dumps(known, indent=1), "utf-8")
            state = result.problem or f"{len(result.failed)} tests fail"
            print(f"{number}/{len(mutations)} {mutation.name}: {state}", file=sys.stderr)
    print(*table(found), sep="\n")
    if asked.worth:
        print("", *worth(found, asked.worth), sep="\n")
    missed = [mutation for mutation, result in found if not result.is_noticed]
    print(f"\n{len(found) - len(missed)} of {len(found)} mutations are noticed.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
