"""What every benchmark needs: a real server process, its use of the machine, and the last line.

Reads Linux's `/proc`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
LOCAL = "127.0.0.1"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0

Figures = dict[str, Any]


class ServerError(RuntimeError):
    """The server did not start, or did not stop."""


class ServerProcess:
    """``everstream serve FLAGS`` on a free port of the loopback, while the ``with`` block runs."""

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed in __exit__
        self.url = ""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "server.cli.main", "serve", "--host", LOCAL, "--port", "0"]
        command += ["--store", "memory"]  # unless a flag says otherwise
        self._process = subprocess.Popen(
            [*command, *self._flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=self._log
        )
        try:
            self.url = self._read_url()
            wait_ready(self.url)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> int:
        """Sends SIGTERM and returns the exit code; raises `ServerError` where none comes."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"the server did not end within {STOP_TIMEOUT_S:g} s") from error

    def log(self) -> str:
        """What the server wrote to stderr so far."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _read_url(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.search(rb"(http://\S+?)/v1/completions", line):
                return found[1].decode()
        raise ServerError(f"the server did not start:\n{self.log()}")

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


def exit_on_sigterm() -> None:
    """Lets SIGTERM unwind the stack, so that no server is left behind."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def wait_ready(url: str) -> None:
    """Returns when the server says that it takes work.

    Its socket listens before the address is printed, so one patient request is
    enough. Raises `ServerError`.
    """
    answer = httpx.get(f"{url}/ready", timeout=START_TIMEOUT_S, trust_env=False)
    if answer.status_code != 200:
        raise ServerError(f"the server is not ready: {answer.text}")


def stream_url(url: str) -> str:
    """The WebSocket address of the server at ``url``."""
    return url.replace("http", "ws", 1) + "/v1/stream"


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used, over all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, exactly; `statm` counts in batches per CPU."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Rss:\s+(\d+) kB", rollup, re.MULTILINE)
    assert found is not None, pid
    return int(found[1]) * 1024


def available_bytes() -> int:
    """Memory that new work can have without swapping."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def num_descriptors(pid: int) -> int:
    """Open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def machine() -> Figures:
    """What the figures were measured on."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": found[1] if found else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_at_start": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def table(title: str, columns: Iterable[str]) -> Table:
    """An empty table whose first column is words and whose others are numbers."""
    result = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        result.add_column(name, justify="right" if index else "left")
    return result


def show(*tables: Table, width: int = 120) -> None:
    """Prints the tables, ``width`` characters wide where the output is no terminal."""
    console = Console(width=None if sys.stdout.isatty() else width)
    for item in tables:
        console.print(item)


def print_result(benchmark: str, on: Figures, figures: Figures) -> None:
    """The last line: one JSON object."""
    print(json.dumps({"benchmark": benchmark, "machine": on, **figures}), flush=True)
