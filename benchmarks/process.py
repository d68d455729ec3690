"""A real server process on a free port of the loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

ROOT = Path(__file__).parent.parent
LOCAL = "127.0.0.1"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


class ServerError(RuntimeError):
    """The server did not start, or did not stop."""


class ServerProcess:
    """``everstream serve FLAGS`` on a free port of the loopback, while the ``with`` block runs.

    ``environment`` is added to that of this process.
    """

    def __init__(self, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        self._flags, self._environment = flags, {**os.environ, **(environment or {})}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed in __exit__
        self.url = ""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "server.cli.main", "serve", "--host", LOCAL, "--port", "0"]
        command += ["--store", "memory"]  # unless a flag says otherwise
        self._process = subprocess.Popen(
            [*command, *self._flags],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=self._log,
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
