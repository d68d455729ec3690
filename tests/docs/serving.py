"""A server that a page's command starts."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.forking import Forked

#: `everstream` as words of a command.
EVERSTREAM = (sys.executable, "-m", "server.cli.main")


@contextmanager
def serving(
    words: Sequence[str], folder: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes] | Forked]:
    """From where it says that it listens; it is killed in the end."""
    with (folder / "log").open("wb") as log:
        process = _started(words, folder, environment, log)
        assert process.stdout is not None
        with process.stdout:
            try:
                listens = any(b"completions" in line for line in process.stdout)
                assert listens, (folder / "log").read_text(encoding="utf-8")
                yield process
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()


def _started(
    words: Sequence[str], folder: Path, environment: dict[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes] | Forked:
    """Forked where ``words`` begin with `EVERSTREAM`, which says nothing of the process's name."""
    if tuple(words[:3]) == EVERSTREAM:
        return Forked(words[2], words[3:], environment, log, folder=folder)
    return subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log)
