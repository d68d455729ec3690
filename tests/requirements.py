"""What some tests need of the machine. Where it is missing they are skipped, with a message."""

from __future__ import annotations

import os
import shutil

import pytest

from model.native.runtime import built
from tests.reliability.confined import can

#: A machine without a compiler runs the other tests.
needs_native = pytest.mark.skipif(not built(), reason="the native runtime was not built")


def program(name: str) -> str | None:
    """The path of a program. Debian has some where only root looks for them."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))


def needs_program(name: str, package: str = "") -> pytest.MarkDecorator:
    """For tests that start a program of Debian's ``package``, which has its name by default."""
    message = f"no {name} (Debian: apt-get install {package or name})"
    return pytest.mark.skipif(program(name) is None, reason=message)


def needs_namespaces(*namespaces: str) -> pytest.MarkDecorator:
    """For tests of processes in namespaces of their own, as `tests.reliability.confined.can`."""
    return pytest.mark.skipif(
        not can(*namespaces), reason="this user may not make namespaces and mount a file system"
    )
