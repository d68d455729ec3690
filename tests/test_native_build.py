"""What the build makes of the C++ sources: a module that runs on any machine of its kind."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
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
    every = ["neon"] if best == "neon" else ["amx", "v4dot", "v4", "v3", "v2"]
    asked = os.environ.get("EVERSTREAM_LEVELS", "native")
    assert module.built_levels() == {"all": every, "native": [best]}[asked]
    runs = [level for level in module.processor_levels() if level in module.built_levels()]
    assert module.levels() == runs


#: Refuses, as a container may, what asks Linux for the unit AMX: arch_prctl(ARCH_REQ_XCOMP_PERM).
REFUSING_AMX = """
import ctypes, errno, struct
LOAD, EQUAL, RETURN, ALLOW = 0x20, 0x15, 0x06, 0x7fff0000
ARCH_PRCTL, REQUEST, NUMBER_AT, ARGUMENT_AT = 158, 0x1023, 0, 16
steps = [(LOAD, 0, 0, NUMBER_AT), (EQUAL, 0, 3, ARCH_PRCTL), (LOAD, 0, 0, ARGUMENT_AT),
         (EQUAL, 0, 1, REQUEST), (RETURN, 0, 0, 0x50000 | errno.EPERM), (RETURN, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
assert prctl(38, 1, 0, 0, 0) == 0, ctypes.get_errno()  # PR_SET_NO_NEW_PRIVS
assert prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP
from model.ops.cpu import _native
print(*_native.processor_levels())
"""


def test_amx_is_no_level_where_linux_refuses_it() -> None:
    if not built() or platform.machine() != "x86_64":
        return
    module = importlib.import_module("model.ops.cpu._native")
    command = [sys.executable, "-c", REFUSING_AMX]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert found.split() == [level for level in module.processor_levels() if level != "amx"]


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
