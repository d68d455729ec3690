"""`everstream serve --ray` as tests see it: its processes, its open ports, its end."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.reliability.servers import ServerProcess

KEY = "a-key-of-the-tests"
HEADERS = {"Authorization": f"Bearer {KEY}"}
REPLICA = "everstream-replica"
#: A cluster takes ten seconds to start, and two minutes where others take the cores.
HANGS_S = 900


class OnRay:
    """A `ServerProcess` with ``--ray`` that is drained at the end, and leaves no process behind."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self._runs = False

    def __enter__(self) -> Self:
        self.server.__enter__()
        self._runs = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._runs:
                self.stop()
        finally:
            self.server.__exit__(kind, error, trace)

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def stream_url(self) -> str:
        return self.server.stream_url

    def stop(self) -> int:
        """SIGTERM; the exit code. Raises `AssertionError` if a process of the cluster is left."""
        processes, self._runs = self.processes(), False
        exit_code = self.server.stop()
        left = [pid for pid in processes if is_running(pid)]
        assert not left, [processes[pid] for pid in left]
        return exit_code

    def processes(self) -> dict[int, str]:
        """All processes of the cluster by their names; they descend from the server's."""
        parents = {pid: parent for pid, parent in map(_parent_of, _pids()) if parent}
        known = {self.server.pid}
        while more := {pid for pid, parent in parents.items() if parent in known} - known:
            known |= more
        return {pid: name for pid in known if (name := name_of(pid)) is not None}

    def named(self, part: str) -> list[int]:
        """The processes of the cluster with ``part`` in their names."""
        return [pid for pid, name in self.processes().items() if part in name]

    def token(self) -> str:
        """What its processes show each other."""
        raylet = self._command("raylet")[0]
        words = Path(f"/proc/{raylet}/environ").read_bytes().decode().split("\0")
        return dict(word.partition("=")[::2] for word in words)["RAY_AUTH_TOKEN"]

    def uses(self, folder: str) -> bool:
        """Whether the files of the cluster are there."""
        return folder in self._command("raylet")[1]

    def _command(self, name: str) -> tuple[int, str]:
        """Process and command line of the one that ends with ``name``."""
        (pid,) = [pid for pid, process in self.processes().items() if process.endswith(name)]
        return pid, Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")

    def listening(self) -> dict[str, str]:
        """Where the processes of the cluster listen: address -> process."""
        found: dict[str, str] = {}
        processes = self.processes()
        table = subprocess.run(["ss", "-ltnpH"], check=True, capture_output=True, text=True).stdout
        for line in table.splitlines():
            for pid in map(int, re.findall(r"pid=(\d+)", line)):
                if pid in processes:
                    found[line.split()[3]] = processes[pid]
        return found


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _parent_of(pid: int) -> tuple[int, int | None]:
    """With its parent; None if it is gone."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return pid, None
    return pid, int(status.rpartition(")")[2].split()[1])


def name_of(pid: int) -> str | None:
    """What the process calls itself; None if it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return words[0].decode(errors="replace")


def is_running(pid: int) -> bool:
    """Whether it is there, and not a zombie that somebody else will reap."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
