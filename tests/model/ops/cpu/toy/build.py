"""Builds the extension module with the toy family in it, for one level, in a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import nanobind

import model.ops.cpu
from model.native.runtime import levels

HERE = Path(__file__).parent
CMAKE = Path(model.ops.cpu.__file__).parent / "cmake"
#: The plainest level of this machine, whose code compiles soonest.
LEVEL = levels()[-1]


def build_module(folder: Path) -> ModuleType:
    """Optimised a little, as it is to be compiled soon; bits do not depend on that."""
    tools = Path(sys.executable).parent
    settings = {
        "CMAKE_MAKE_PROGRAM": tools / "ninja",
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_FLAGS_RELEASE": "-O1",
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": nanobind.cmake_dir(),
        "EVERSTREAM_LEVELS": LEVEL,
        "EVERSTREAM_FAMILY_DIR": HERE,
        "EVERSTREAM_NB_DOMAIN": "toy",
    }
    options = [f"-D{name}={value}" for name, value in settings.items()]
    run(tools / "cmake", "-S", CMAKE, "-B", folder, "-G", "Ninja", *options)
    run(tools / "cmake", "--build", folder)
    path = folder / f"_native{EXTENSION_SUFFIXES[0]}"
    spec = spec_from_file_location(
        "_native", path, loader=ExtensionFileLoader("_native", str(path))
    )
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
