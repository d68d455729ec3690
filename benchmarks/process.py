"""Processes that are measured: servers on a port of the loopback, and workers on pipes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

import httpx

from tests.reserved_port import ReservedPort

ROOT = Path(__file__).parent.parent
LOCAL = "127.0.0.1"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.1
MAX_LOG_CHARS = 4000


class ServerError(RuntimeError):
    """The server did not start, or did not stop."""


class Process:
    """``command`` on two pipes and a log for stderr, while the ``with`` block runs.

    ``environment`` is added to that of this process. Where its ``output`` is not read it goes to
    the log.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        is_read: bool = True,
    ) -> None:
        self._is_read = is_read
        self._command = list(command)
        self._environment = {**os.environ, **(environment or {})}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed in __exit__

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if self._is_read else self._log,
            stderr=self._log,
        )
        try:
            self.wait_started()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what it died before reading is still unwritten
                    pipe.close()

    def wait_started(self) -> None:
        """Returns when the process can be used. Raises `ServerError`."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def requests(self) -> IO[bytes]:
        """Its stdin."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def output(self) -> IO[bytes]:
        """Its stdout."""
        assert self._process.stdout is not None
        return self._process.stdout

    def stop(self) -> int:
        """Sends SIGTERM and returns the exit code; raises `ServerError` where none comes."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"the server did not end within {STOP_TIMEOUT_S:g} s") from error

    def log(self) -> str:
        """What the process wrote to stderr so far."""
        # Not by `read`: the offset is the one at which the process writes.
        written = os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0)
        return written.decode(errors="replace")


class ServerProcess(Process):
    """``everstream serve FLAGS``, or another ``module`` of ours that prints its address.

    Unless a flag says otherwise it stores in memory and drafts nothing: how many tokens would be
    drafted depends on how long calls took at its start.
    """

    def __init__(
        self,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        module: str = "server.cli.main",
    ) -> None:
        command = [sys.executable, "-m", module]
        if module == "server.cli.main":
            command += ["serve", "--host", LOCAL, "--port", "0", "--store", "memory"]
            command += ["--speculation", "off"]
        super().__init__([*command, *flags], environment)
        self.url = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def wait_started(self) -> None:
        """Its socket listens before the address is printed, so one patient request is enough."""
        for line in self.output:
            if found := re.search(rb"http://[^/\s]+", line):
                self.url = found[0].decode()
                break
        else:
            raise ServerError(f"the server did not start:\n{self.log()}")
        answer = httpx.get(f"{self.url}/ready", timeout=START_TIMEOUT_S, trust_env=False)
        if answer.status_code != 200:
            raise ServerError(f"the server is not ready: {answer.text}")


class PeerProcess(Process):
    """Another project's server on a reserved port."""

    def __init__(self, command: Sequence[str]) -> None:
        self._port = ReservedPort()
        super().__init__([*command, "--port", str(self._port.number)], is_read=False)
        self.url = f"http://{LOCAL}:{self._port.number}"

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._port.close()

    def wait_started(self) -> None:
        """Until ``/health`` is 200; before that some listen and some do not."""
        until = time.monotonic() + START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < until:
            try:
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(POLL_S)
        raise ServerError(f"{self._command[0]} did not start:\n{self.log()[-MAX_LOG_CHARS:]}")


def make_once(path: Path, write: Callable[[Path], object]) -> Path:
    """``path``, which ``write`` makes under another name where it is missing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"unfinished-{path.name}")
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        write(unfinished)
        unfinished.rename(path)
    return path


def exit_on_sigterm() -> None:
    """Lets SIGTERM unwind the stack, so that no server is left behind."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
