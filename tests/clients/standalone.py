"""The client as a user has it: built, and installed in an environment without the project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent
CLIENT = ROOT / "clients" / "python"
DEPENDENCIES = ("httpx", "websockets")
#: What `make` and tests set for the project; paths in it are from its folder.
OURS = ("PYTHONPATH", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")


class Standalone:
    """``python`` is that of the environment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.wheel = self._build()
        venv.create(folder / "environment", symlinks=True)
        self.python = folder / "environment" / "bin" / "python"
        (site,) = (folder / "environment").glob("lib/python*/site-packages")
        self._succeed(
            *(sys.executable, "-m", "pip", "--disable-pip-version-check"),
            *("--python", str(self.python), "install", "--quiet", "--no-index", "--no-deps"),
            str(self.wheel),
        )
        self._lend_dependencies(site)

    def run(self, code: str) -> str:
        """What ``code`` prints, far from the repository. Warnings are errors."""
        return self._succeed(str(self.python), "-I", "-W", "error", "-c", code)

    def _build(self) -> Path:
        command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel")
        self._succeed(*command, "-d", str(self._folder), folder=CLIENT)
        (wheel,) = self._folder.glob("*.whl")
        return wheel

    def _lend_dependencies(self, site: Path) -> None:
        """Links to what is installed here: tests fetch nothing."""
        for name in sorted(closure(DEPENDENCIES)):
            found = distribution(name)
            for top in {file.parts[0] for file in found.files or () if ".." not in file.parts}:
                if top != "__pycache__":
                    (site / top).symlink_to(Path(str(found.locate_file(top))))

    def _succeed(self, *command: str, folder: Path | None = None) -> str:
        clean = {name: value for name, value in os.environ.items() if name not in OURS}
        done = subprocess.run(
            command,
            cwd=folder or self._folder,
            env=clean,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def closure(names: tuple[str, ...]) -> set[str]:
    """These distributions and all that they need, extras left out."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += needs(distribution(name))
    return found


def needs(of: Distribution) -> list[str]:
    wanted = [Requirement(one) for one in of.requires or ()]
    here = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [one.name for one in here]


def python_blocks(page: str) -> list[str]:
    """The fenced Python of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
