"""Environments of the clients, whose dependencies clash with ours and with each other's.

Each is made from its pinned list under `.compat/` in the clone, and used again
while nothing it is made from changes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.exclusive import exclusive

HERE = Path(__file__).parent
PLACE = HERE.parent.parent / ".compat"
INSTALL_TIMEOUT_S = 1500.0


@dataclass(frozen=True)
class Client:
    """A client's folder of checks, and what runs them: ``program`` is its Python or Node."""

    folder: Path
    program: Path

    def run(self, *arguments: object, timeout_s: float, **environment: str) -> str:
        """Runs the program in the client's folder; its output, where it ends well."""
        return succeed([self.program, *arguments], self.folder, timeout_s, **environment)

    @contextmanager
    def running(self, *arguments: object, **environment: str) -> Iterator[Iterator[str]]:
        """The lines that the program prints while the block runs; it must end well by itself."""
        process = subprocess.Popen(
            [str(part) for part in (self.program, *arguments)],
            cwd=self.folder,
            env={**_outer_environment(), **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            yield (line.rstrip("\n") for line in process.stdout)
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.communicate()

    def check(self, *files: str, timeout_s: float = 300.0, **environment: str) -> str:
        """Runs checks with the environment's own pytest; none may be skipped."""
        options = ("--config-file", HERE / "checks.ini", "--rootdir", self.folder)
        output = self.run("-m", "pytest", *options, *files, timeout_s=timeout_s, **environment)
        assert " passed" in output, output
        assert "skipped" not in output, output
        return output


def python_client(name: str) -> Client:
    """The environment that `NAME/requirements.txt` pins, made if need be."""
    folder, place = HERE / name, PLACE / name
    requirements = folder / "requirements.txt"
    program = place / "bin" / "python"
    stamp = place / "installed-from"
    made_from = _digest(requirements.read_bytes(), sys.version.encode())
    with exclusive(HERE / name):
        if not stamp.exists() or stamp.read_text() != made_from:
            shutil.rmtree(place, ignore_errors=True)
            succeed([sys.executable, "-m", "venv", "--without-pip", place], HERE, INSTALL_TIMEOUT_S)
            # Most modules are never imported: those that are get compiled then.
            install = ("install", "--quiet", "--no-compile", "--requirement", requirements)
            pip = (sys.executable, "-m", "pip", "--python", program)
            succeed([*pip, *install], HERE, INSTALL_TIMEOUT_S)
            stamp.write_text(made_from)
    return Client(folder, program)


def node_client(name: str) -> Client:
    """Node with the packages that `NAME/package-lock.json` pins, installed if need be.

    Its folder is a copy, because Node looks for packages next to the file that imports them.
    """
    place = PLACE / name
    place.mkdir(parents=True, exist_ok=True)
    node, npm = (_found(program) for program in ("node", "npm"))
    stamp = place / "node_modules" / "installed-from"
    made_from = _digest((HERE / name / "package-lock.json").read_bytes())
    with exclusive(HERE / name):
        copy_checks(HERE / name, place)
        if not stamp.exists() or stamp.read_text() != made_from:
            quiet = ("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error")
            succeed([npm, "ci", "--ignore-scripts", *quiet], place, INSTALL_TIMEOUT_S)
            stamp.write_text(made_from)
    return Client(place, node)


def copy_checks(folder: Path, place: Path) -> None:
    """Changes nothing where all is the same: another process may be running it."""
    wanted = {file.name: file.read_bytes() for file in folder.iterdir()}
    for old in place.glob("*.mjs"):
        if old.name not in wanted:
            old.unlink()
    for name, content in wanted.items():
        copy = place / name
        if not copy.exists() or copy.read_bytes() != content:
            copy.write_bytes(content)


def succeed(command: list[object], folder: Path, timeout_s: float, **environment: str) -> str:
    """What ``command`` prints. Fails with all of it where it does not end with 0."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**_outer_environment(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    shown = " ".join(map(str, command))
    assert done.returncode == 0, f"{shown} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def _outer_environment() -> Mapping[str, str]:
    """Without what the project pins and sets for itself."""
    ours = ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT", "PYTHONPATH", "PYTEST_ADDOPTS")
    return {name: value for name, value in os.environ.items() if name not in ours}


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _found(program: str) -> Path:
    """Fails, and does not skip, where it is missing: a skip would go unnoticed."""
    path = shutil.which(program)
    assert path is not None, f"{program} is not installed (Debian: apt-get install nodejs npm)"
    return Path(path)
