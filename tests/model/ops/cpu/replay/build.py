"""Builds replay.cpp together with the runtime's sources, without Python."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import model.ops.cpu

HERE = Path(__file__).parent
SOURCES = Path(model.ops.cpu.__file__).parent / "src"
#: Those of CMakeLists.txt that decide bits.
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")


def build_replay(program: Path, compiler: str, flags: Sequence[str]) -> Path:
    """Compiles everything for one level, whose name is in ``flags``."""
    sources = [p for p in sorted(SOURCES.rglob("*.cpp")) if not p.stem.endswith("bindings")]
    command = [compiler, *FLAGS, *flags, "-pthread", f"-I{SOURCES}", HERE / "replay.cpp"]
    subprocess.run([*command, *sources, "-o", program], check=True)
    return program
