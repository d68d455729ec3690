"""A home folder with nothing in it, for a run of the tests and every process that they start.

What a test finds in the user's caches (fonts, downloads, packages) a new machine does not have.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

#: Variables that name folders which otherwise lie in the home folder.
MOVED = (
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "MPLCONFIGDIR"),
    *("PIP_CACHE_DIR", "npm_config_cache", "NPM_CONFIG_CACHE", "HF_HOME", "HF_HUB_CACHE"),
)

#: Settings of tools, such as the package index, stay the user's: variable -> where the file may be.
SETTINGS = {
    "GIT_CONFIG_GLOBAL": (".gitconfig",),
    "PIP_CONFIG_FILE": (".config/pip/pip.conf", ".pip/pip.conf"),
    "NPM_CONFIG_USERCONFIG": (".npmrc",),
}


class EmptyHome:
    """Makes ``environment`` name an empty home folder; `close` removes the folder."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        before = Path(environment.get("HOME", "/"))
        for variable, names in SETTINGS.items():
            files = [file for name in names if (file := before / name).is_file()]
            if files:
                environment.setdefault(variable, str(files[0]))
        for variable in MOVED:
            environment.pop(variable, None)
        self.path = Path(tempfile.mkdtemp(prefix="everstream-home-"))
        environment["HOME"] = str(self.path)

    def close(self) -> None:
        """Once no process of the tests runs any more."""
        shutil.rmtree(self.path, ignore_errors=True)


def is_worker() -> bool:
    """Whether this process runs tests for another one of pytest, whose home it has already."""
    return "PYTEST_XDIST_WORKER" in os.environ
