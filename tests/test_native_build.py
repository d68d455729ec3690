"""What the build makes of the C++ sources: a module that runs on any machine of its kind."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from collections import defaultdict
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

NATIVE = Path(__file__).parent.parent / "model" / "ops" / "cpu"
MODULE = NATIVE / f"_native{EXTENSION_SUFFIXES[0]}"
OBJECTS = NATIVE / "cmake" / "CMakeFiles"
C_LIBRARY = re.compile(r"(libc|libm|libpthread|ld-linux.*)\.so\.\d+")


def test_module_is_built_where_a_compiler_is() -> None:
    assert MODULE.is_file() or shutil.which("c++") is None


def test_module_needs_the_c_library_alone() -> None:
    needed = [name for module in built() for name in needed_by(module)]
    assert [name for name in needed if not C_LIBRARY.fullmatch(name)] == []


def test_levels_share_no_inline_code() -> None:
    """Of equal inline functions the linker keeps one: never one that this machine cannot run."""
    targets = inline_functions()
    assert targets or not built()
    for level in (name for name in targets if name.startswith("kernels_")):
        elsewhere = set().union(*(found for name, found in targets.items() if name != level))
        assert targets[level] & elsewhere == set(), level


def test_module_has_the_levels_that_were_asked_for() -> None:
    """CI builds all, so that its tests go over all that its processor has; others take the best."""
    if not built():
        return
    module = importlib.import_module("model.ops.cpu._native")
    best = module.processor_levels()[0]
    every = ["neon"] if best == "neon" else ["v4dot", "v4", "v3", "v2"]
    asked = os.environ.get("EVERSTREAM_LEVELS", "native")
    assert module.built_levels() == {"all": every, "native": [best]}[asked]
    runs = [level for level in module.processor_levels() if level in module.built_levels()]
    assert module.levels() == runs


def built() -> list[Path]:
    return [MODULE] if MODULE.is_file() else []


def needed_by(module: Path) -> list[str]:
    return re.findall(r"NEEDED.*\[(.+)\]", output("readelf", "--dynamic", str(module)))


def inline_functions() -> dict[str, set[str]]:
    """The names of the weak functions and variables that each target of the build defines."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in OBJECTS.glob("*.dir/**/*.o"):
        target = path.relative_to(OBJECTS).parts[0].removesuffix(".dir")
        for line in output("nm", "--defined-only", str(path)).splitlines():
            _, kind, name = line.rsplit(maxsplit=2)
            if kind in "WVu":
                found[target].add(name)
    return found


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
