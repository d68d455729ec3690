"""Builds replay.cpp together with the runtime's sources, without Python."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

import model.ops.cpu
from tests.exclusive import exclusive, folder_of_run

HERE = Path(__file__).parent
SOURCES = Path(model.ops.cpu.__file__).parent / "src"
#: Those of CMakeLists.txt that decide bits. How much is optimised decides none.
FLAGS = ("-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")


def build_replay(
    name: str, compiler: str, flags: Sequence[str], factory: pytest.TempPathFactory
) -> Path:
    """The program for one level, whose name is in ``flags``; workers of one run share it."""
    folder = folder_of_run(name, factory)
    program = folder / "replay"
    with exclusive(folder):
        if not program.exists():
            _compile(program, compiler, flags)
    return program


def _compile(program: Path, compiler: str, flags: Sequence[str]) -> None:
    sources = [p for p in sorted(SOURCES.rglob("*.cpp")) if not p.stem.endswith("bindings")]
    command = [compiler, *FLAGS, *flags, "-pthread", f"-I{SOURCES}", HERE / "replay.cpp"]
    unfinished = program.with_suffix(".unfinished")
    subprocess.run([*command, *sources, "-o", unfinished], check=True)
    unfinished.rename(program)
