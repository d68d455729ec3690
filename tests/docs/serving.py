"""A server that a page's command starts."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(
    words: Sequence[str], folder: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """From where it says that it listens; it is killed in the end."""
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            listens = any("completions" in line for line in process.stdout)
            assert listens, (folder / "log").read_text(encoding="utf-8")
            yield process
        finally:
            process.send_signal(signal.SIGKILL)
