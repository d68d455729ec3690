"""What a user installs: the pins, the wheel's contents, the command, the tasks of the Makefile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docs.pages import names, page, rows, section

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT: dict[str, Any] = PYPROJECT["project"]

#: What building, testing and running leave in a tree, and no archive may carry.
LITTER = (
    "server/__pycache__/main.cpython-311.pyc",
    "clients/javascript/node_modules/typescript/package.json",
    "clients/javascript/types/everstream.d.ts",
    "model/ops/cpu/_native.cpython-311-x86_64-linux-gnu.so",
    "model/ops/cpu/cmake/CMakeCache.txt",
    "model/ops/cpu/cmake/CMakeFiles/native.dir/kernels.cpp.o",
)

VOCABULARY = "model/tokenization/rwkv_vocab_v20230424.txt"
FONT_LICENCES = {
    "server/api/static/fonts/inter-OFL.txt",
    "server/api/static/fonts/newsreader-OFL.txt",
}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): pin for name, pin in pairs}


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    names = [*PROJECT["dependencies"], *(name for extra in extras for name in extra)]
    return [r for r in map(Requirement, names) if r.name != PROJECT["name"]]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with known litter: in the tree itself others write while it is walked."""
    tree = tmp_path_factory.mktemp("tree")
    clean = shutil.ignore_patterns("__pycache__", "node_modules", "CMakeFiles", "*.so")
    for name in PYPROJECT["tool"]["scikit-build"]["sdist"]["include"]:
        source, copy = ROOT / name.lstrip("/"), tree / name.lstrip("/")
        if source.is_dir():
            shutil.copytree(source, copy, ignore=clean)
        else:
            shutil.copy(source, copy)
    for name in LITTER:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("litter")
    return tree


@pytest.fixture(scope="module")
def pure_wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as it comes out where there is no C++ compiler."""
    folder = tmp_path_factory.mktemp("wheel")
    done = build_without_compiler("wheel", tree, folder)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel_files(pure_wheel: Path) -> set[str]:
    return {name for name in ZipFile(pure_wheel).namelist() if ".dist-info/" not in name}


@pytest.mark.parametrize("requirement", requirements(), ids=lambda r: r.name)
def test_each_dependency_is_pinned_within_its_range(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_installed_version_is_the_projects() -> None:
    assert version("everstream") == PROJECT["version"]


def test_command_is_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="everstream")
    assert script.value == PROJECT["scripts"]["everstream"]


@pytest.mark.parametrize("package", ["server", "model", "clients"])
def test_wheel_carries_types(wheel_files: set[str], package: str) -> None:
    assert f"{package}/py.typed" in wheel_files


@pytest.mark.parametrize("folder", ["server/api/static", "model/bundled"])
def test_wheel_carries_every_data_file(wheel_files: set[str], folder: str) -> None:
    present = {p.relative_to(ROOT).as_posix() for p in (ROOT / folder).rglob("*") if is_data(p)}
    assert present
    assert present <= wheel_files


def test_wheel_carries_the_javascript_client_that_the_page_uses(wheel_files: set[str]) -> None:
    modules = (ROOT / "clients" / "javascript").glob("*.js")
    present = {path.relative_to(ROOT).as_posix() for path in modules}
    assert "clients/javascript/everstream.js" in present
    assert present <= wheel_files
    assert {name for name in wheel_files if "node_modules" in name} == set()


def test_wheel_carries_the_three_packages_alone(wheel_files: set[str]) -> None:
    assert {path.partition("/")[0] for path in wheel_files} == {"server", "model", "clients"}


def test_wheel_without_a_compiler_is_pure_python(pure_wheel: Path, wheel_files: set[str]) -> None:
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    assert {name for name in wheel_files if name.startswith("model/ops/cpu/_native.c")} == set()
    assert wheel_files & set(LITTER) == set()


def test_wheel_carries_the_published_vocabulary(wheel_files: set[str]) -> None:
    assert VOCABULARY in wheel_files


def test_wheel_carries_no_sources_of_the_extension(wheel_files: set[str]) -> None:
    suffixes = (".cpp", ".h", ".txt", ".so")
    assert {name for name in wheel_files if name.endswith(suffixes)} <= {*FONT_LICENCES, VOCABULARY}


def test_build_fails_where_the_native_runtime_is_required(tree: Path, tmp_path: Path) -> None:
    done = build_without_compiler("wheel", tree, tmp_path, EVERSTREAM_REQUIRE_NATIVE="1")
    assert done.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_sdist_carries_the_sources_and_nothing_built(tree: Path, tmp_path: Path) -> None:
    assert build_without_compiler("sdist", tree, tmp_path).returncode == 0
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    sources = [p for p in (ROOT / "model/ops/cpu/src").rglob("*") if p.is_file()]
    wanted = {"pyproject.toml", "LICENSE", "Makefile", "model/ops/cpu/cmake/CMakeLists.txt"}
    assert wanted | {path.relative_to(ROOT).as_posix() for path in sources} <= names
    assert {name for name in names if name.startswith("model/ops/cpu/cmake/")} <= wanted
    assert {name for name in names if name.endswith((".so", ".pyc"))} == set()
    assert names & set(LITTER) == set()


@pytest.mark.parametrize(
    "target",
    [
        *("serve", "test", "reliability", "chaos", "compat", "lint", "format", "bench", "soak"),
        *("docker", "docker-check", "clean"),
    ],
)
def test_makefile_can_do(target: str) -> None:
    listed = make("help")
    assert re.search(rf"^  make {target} ", listed, re.MULTILINE), listed
    assert make("--dry-run", target)


def test_makefile_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python2"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo "Python 3.8.1"\nexit 1\n')
    old.chmod(0o755)
    command = ["make", "serve", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "Python 3.8.1" in done.stderr


def build_without_compiler(
    kind: str, tree: Path, folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Calls the build backend as pip does, with a compiler that compiles nothing."""
    code = f"import scikit_build_core.build as b; b.build_{kind}({str(folder)!r})"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env=environment() | {"CXX": shutil.which("false") or "false"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def is_data(path: Path) -> bool:
    return path.is_file() and path.suffix != ".pyc"


def make(*arguments: str) -> str:
    done = subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def environment() -> dict[str, str]:
    """Without what an outer make hands down, so that a test sees the same with and without one."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}


def test_torch_is_an_extra_and_no_dependency() -> None:
    optional = PROJECT["optional-dependencies"]
    names = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert "torch" not in names
    assert {Requirement(line).name for line in optional["torch"]} == {"torch"}
    assert "everstream[torch]" in optional["train"]


def test_install_page_has_every_extra_of_a_user() -> None:
    shown = {
        n for row in rows(section(page("install.md"), "What is installed")) for n in names(row[0])
    }
    assert shown == PROJECT["optional-dependencies"].keys() - {"bench", "dev"}
