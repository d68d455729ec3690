"""Processes of ours without the seconds of a core that the imports of a server, or torch, take.

A process that has imported them forks once for each one: `Forked` is used as
`subprocess.Popen` is, and `run` as `subprocess.run`. What is forked is a process like any
other, with its own pid, memory, environment and descriptors; it then runs its module as
``python -m`` does. Only ``/proc/PID/cmdline`` tells the difference.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parent.parent

#: What a server has imported when it takes requests, without what starts threads.
IMPORTED = (
    "server.api.app",
    "server.cli.inspect",
    "server.cli.serve",
    "server.cluster.shared",
    "server.http.server",
    "server.models.build",
    "server.observability.tracing",
    "tests.fakes",
    "tests.server.one_model",
    "uvicorn.lifespan.on",
)

#: What commands have imported besides when they compute on torch. No command of the hub has: its
#: library reads the environment when it is imported.
OF_TORCH = (
    "model.convert.convert",
    "model.export.rwkv7",
    "model.training.loop",
    "torch._dynamo",  # which every optimizer imports
)

CLONE_NEWNET = 0x40000000
#: Longer than any request of ours.
MOST_BYTES = 1 << 20


class Forked:
    """``python -m MODULE ARGUMENTS`` in ``folder``, by default the root of the repository.

    Without ``stderr`` it writes all to stdout. With ``network`` it runs in that network namespace.
    ``has_torch``: torch is imported already.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        stderr: IO[bytes] | None,
        network: str | None = None,
        folder: Path = ROOT,
        has_torch: bool = False,
    ) -> None:
        self.command = [module, *arguments]
        sys.audit("subprocess.Popen", sys.executable, self.command, folder, env)
        started = {"command": self.command, "env": dict(env), "network": network}
        started["folder"] = str(folder)
        self._forker = _forker(has_torch)
        read, written = os.pipe()
        self.stdout = open(read, "rb")  # noqa: SIM115 - its user closes it, as with Popen
        try:
            errors = written if stderr is None else stderr.fileno()
            self.pid: int = self._forker.ask(started, written, errors)
        finally:
            os.close(written)
        self.returncode: int | None = None
        self._reaps = threading.Lock()
        self._ended = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self._ended)

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._ended, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        return self.returncode if self._has_ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises `subprocess.TimeoutExpired`."""
        if not self._has_ended(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.command, timeout)
        assert self.returncode is not None
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._ended, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                return False
            with self._reaps:  # another thread may wait for it as well
                if self.returncode is None:
                    status = self._forker.ask({"ended": self.pid})
                    self.returncode = os.waitstatus_to_exitcode(status)
        return True


def run(
    module: str, arguments: Sequence[str], env: Mapping[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """``python -m MODULE ARGUMENTS`` in ``folder``, torch imported, to its end."""
    with tempfile.TemporaryFile() as stderr:
        process = Forked(module, arguments, env, stderr, folder=folder, has_torch=True)
        with process.stdout:
            written = process.stdout.read().decode()
        code = process.wait()
        stderr.seek(0)
        return subprocess.CompletedProcess(process.command, code, written, stderr.read().decode())


class Forker:
    """The process that forks. It ends with the one that started it."""

    def __init__(self, has_torch: bool) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asks = threading.Lock()
        self._num_asked = 0
        # The libraries of numpy would start threads, of which a fork has none.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.forking", str(theirs.fileno())]
        command += OF_TORCH if has_torch else ()
        with theirs:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=env, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL
            )

    def ask(self, request: dict[str, Any], *descriptors: int) -> int:
        """Its answer. Raises `OSError` where it could not do that."""
        with self._asks:
            self._num_asked += 1
            message = json.dumps({"number": self._num_asked, **request}).encode()
            socket.send_fds(self._socket, [message], descriptors)
            answer: dict[str, int] = {"number": 0}
            while answer["number"] != self._num_asked:  # of a question that was interrupted
                answer = json.loads(self._socket.recv(MOST_BYTES))
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        return answer["result"]

    def close(self) -> None:
        """Ends it; what it forked lives on."""
        self._socket.close()
        self.process.wait()


_starts = threading.Lock()


def _forker(has_torch: bool) -> Forker:
    with _starts:
        return _started(has_torch)


@cache
def _started(has_torch: bool) -> Forker:
    forker = Forker(has_torch)
    atexit.register(forker.close)
    return forker


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    for module in (*IMPORTED, *sys.argv[2:]):
        import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1
    gc.freeze()
    while asked := socket.recv_fds(control, MOST_BYTES, 2):
        message, descriptors, _, _ = asked
        if not message:
            return
        request = json.loads(message)
        answer: dict[str, int | None] = {"number": request.pop("number")}
        try:
            if "ended" in request:
                answer["result"] = os.waitpid(request["ended"], 0)[1]
            else:
                answer["result"] = os.fork()
        except OSError as error:
            answer["errno"] = error.errno
        if answer.get("result") == 0 and "ended" not in request:
            control.close()
            become(*descriptors, **request)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(json.dumps(answer).encode())


def become(
    stdout: int,
    stderr: int,
    *,
    command: Sequence[str],
    env: Mapping[str, str],
    network: str | None,
    folder: str,
) -> None:
    """Runs ``command``: a module and its arguments."""
    for target, descriptor in ((1, stdout), (2, stderr)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    if network is not None:
        enter(Path("/run/netns") / network)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    gc.enable()
    sys.argv[1:] = command[1:]
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def enter(network: Path) -> None:
    """From here on this process, of one thread, is in that network namespace."""
    with network.open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns: {network}")


if __name__ == "__main__":
    main()
