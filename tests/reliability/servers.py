"""Real server processes on the loopback: started, looked at in `/proc`, killed, started again."""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect

from tests.forking import Forked
from tests.reserved_port import ReservedPort
from tests.stopping import stop
from tests.waiting import STUCK_S, wait_until

ROOT = Path(__file__).parent.parent.parent
LOCAL = "127.0.0.1"
#: After so long without an answer `/ready` is asked once more: a cut wire may have lost it.
READY_TIMEOUT_S = 10.0

EVERSTREAM = ("server.cli.main", "serve", "--host", LOCAL)
#: The same with drafts that always pay.
DRAFTING = ("tests.reliability.drafting_server", *EVERSTREAM[1:], "--speculation", "auto")
FAKE = ("tests.fake_server",)
#: Programs that are servers; another one may run a server as it likes.
FORKED = (EVERSTREAM[0], DRAFTING[0], *FAKE, "tests.reliability.faulty_server")
#: Runs a command in the network namespace whose name follows.
IN_NETWORK = ("ip", "netns", "exec")


class ServerProcess:
    """``everstream serve FLAGS`` while the ``with`` block runs; `restart` keeps flags and port.

    ``program`` `FAKE` is the same server over the fake engine. ``environment`` is
    added to this process's own. Its port is reserved until `close`. With ``host`` and
    ``port`` it listens elsewhere, and ``within`` is a command that runs it there, such as
    ``ip netns exec NAME``. Blocking: from a coroutine use `asyncio.to_thread` where the
    wait matters.
    """

    def __init__(
        self,
        *flags: object,
        program: tuple[str, ...] = EVERSTREAM,
        environment: Mapping[str, str] | None = None,
        port: int = 0,
        host: str = LOCAL,
        within: tuple[str, ...] = (),
    ) -> None:
        self._host, self._within = host, within
        self._flags = [str(flag) for flag in flags]
        if host != LOCAL:
            self._flags += ["--host", host]
        self._program = program
        self._environment = {**os.environ, **(environment or {})}
        self._reserved = None if port else ReservedPort()
        self.port = port if self._reserved is None else self._reserved.number
        self._network = within[-1] if within[:-1] == IN_NETWORK else None
        # Other variables may be read while modules are imported.
        self._forks = (
            hasattr(os, "pidfd_open")
            and (not within or self._network is not None)
            and program[0] in FORKED
            and "--ray" not in self._flags
            and all(name.startswith("EVERSTREAM_") for name in environment or {})
        )
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._process: subprocess.Popen[bytes] | Forked | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Life

    def start(self) -> None:
        """Starts the process and returns when it answers `/ready` with 200."""
        self.launch()
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise

    def launch(self) -> None:
        """Starts the process and returns at once; `wait_ready` finds out how it went."""
        assert self._process is None, "already runs"
        module, *words = [*self._program, "--port", str(self.port), *self._flags]
        if self._forks:
            self._process = Forked(module, words, self._environment, self._log, self._network)
            return
        command = [*self._within, sys.executable, "-m", module, *words]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=self._environment, stdout=subprocess.PIPE, stderr=self._log
        )

    def wait_listening(self) -> bool:
        """Returns when its socket listens, or with False when it has closed its output, to end."""
        stdout = self._running.stdout
        assert stdout is not None
        for line in stdout:
            if found := re.search(
                rb"^port (\d+)$|http://\S+?:(\d+)/v1/(?:chat/)?completions", line
            ):
                self.port = int(found[1] or found[2])
                return True
        return False

    def wait_ready(self) -> None:
        """Returns when the server takes work.

        Raises `AssertionError` with its log if it ends, or takes none after `STUCK_S`.
        """
        assert self.wait_listening(), f"the server did not start:\n{self.log()}"

        def takes_work() -> bool:
            assert not self.has_ended, f"the server did not start:\n{self.log()}"
            return self.takes_work()

        try:
            wait_until(takes_work)
        except TimeoutError:
            raise AssertionError(f"the server takes no work:\n{self.log()}") from None

    async def ended(self) -> int | None:
        """Returns when the process has ended, by itself or not; None where it is not known how."""
        process = self._running
        ended, watched = asyncio.Event(), os.pidfd_open(process.pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(watched, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(watched)
            os.close(watched)
        return process.poll()

    def kill(self) -> None:
        """SIGKILL, if it runs; returns when the process is gone."""
        if self._process is not None:
            self._process.kill()
            self._forget()

    def close(self) -> None:
        """Kills it, if it runs, and forgets its log and its port."""
        self.kill()
        self._log.close()
        if self._reserved is not None:
            self._reserved.close()

    def stop(self) -> int:
        """SIGTERM; returns the exit code. Kills the process if it does not end."""
        process = self._running
        process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self, timeout_s: float = STUCK_S) -> int:
        """The exit code of a process that ends by itself."""
        try:
            return self._running.wait(timeout_s)
        finally:
            self.kill()

    def restart(self) -> None:
        """Kills it, if it runs, and starts it with the same flags on the same port."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: it keeps its sockets and files and does nothing."""
        stop(self._running.pid)

    def go_on(self) -> None:
        """SIGCONT after `pause`."""
        self._running.send_signal(signal.SIGCONT)

    def allow_descriptors(self, number: int) -> None:
        """Raises the process's own bound on open files; it cannot pass the hard one."""
        hard = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (number, hard))

    # What can be seen of it

    @property
    def runs(self) -> bool:
        """Whether it was started, and nobody has seen it end."""
        return self._process is not None

    @property
    def has_ended(self) -> bool:
        """Whether the process that was started has ended."""
        return self._running.poll() is not None

    def takes_work(self) -> bool:
        """Whether it runs and answers `/ready` with 200."""
        try:
            return self.runs and self.get("/ready", READY_TIMEOUT_S)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.port}"

    @property
    def stream_url(self) -> str:
        return f"ws://{self._host}:{self.port}/v1/stream"

    def log(self) -> str:
        """What it and its predecessors wrote to stderr."""
        # Not by `read`: the offset is the one at which the process writes.
        written = os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0)
        return written.decode(errors="replace")

    def resident_bytes(self) -> int:
        """Resident memory, exactly: `statm` counts in batches per CPU."""
        rollup = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        found = re.search(r"^Rss:\s+(\d+) kB", rollup, re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024

    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def get(self, path: str, timeout_s: float = STUCK_S) -> tuple[int, str]:
        """Status and body of a GET on a connection of its own, closed after it."""
        connection = http.client.HTTPConnection(self._host, self.port, timeout=timeout_s)
        try:
            connection.request("GET", path, headers={"Connection": "close"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def gauges(self) -> dict[tuple[Any, ...], float]:
        """The gauges and counters of `/metrics`: name and label values -> value.

        Without the model's label: of several models' each is the sum.
        """
        _, text = self.get("/metrics")
        found: dict[tuple[Any, ...], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = [value for name, value in sample.labels.items() if name != "model"]
                key = (sample.name, *labels)
                found[key] = found.get(key, 0.0) + sample.value
        return found

    # Inside

    @property
    def _running(self) -> subprocess.Popen[bytes] | Forked:
        assert self._process is not None, "does not run"
        return self._process

    def _forget(self) -> None:
        process, self._process = self._running, None
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def socket_to(url: str, **options: Any) -> connect:
    """A socket that always reads, so that closing it never waits for the test to.

    Neither a busy machine nor a server that stands still for long makes it give up.
    """
    patient = {"open_timeout": STUCK_S, "ping_interval": None}
    return connect(url, **{"compression": None, "max_queue": None, **patient, **options})
