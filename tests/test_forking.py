"""What is forked is a process like any other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.network import can_have_namespaces
from tests.forking import ROOT, Forked, Forker
from tests.needs import Guard
from tests.test_needs import item

pytestmark = pytest.mark.process


@contextmanager
def forked(*words: str, network: str | None = None) -> Iterator[tuple[Forked, dict[str, Any], Any]]:
    """This file as a program, what it says about itself, and its stderr."""
    with tempfile.TemporaryFile() as stderr:
        process = Forked("tests.test_forking", words, {"EVERSTREAM_A": "1"}, stderr, network)
        try:
            yield process, json.loads(process.stdout.readline()), stderr
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def main() -> None:
    """Says what it is, then fails with its argument, or waits for a signal."""
    told = {
        "pid": os.getpid(),
        "folder": os.getcwd(),
        "env": dict(os.environ),
        "words": sys.argv,
        "name": __name__,
        "descriptors": [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.exists()],
        "network": os.readlink("/proc/self/ns/net"),
        "threads": len(os.listdir("/proc/self/task")),
    }
    print(json.dumps(told), flush=True)
    if words := sys.argv[1:]:
        sys.exit(int(words[0]) if words[0].isdigit() else words[0])
    signal.pause()


def test_is_a_process_of_its_own_as_python_would_start_it() -> None:
    with forked() as (process, told, _), forked() as (other, _, _):
        assert told["pid"] == process.pid != other.pid
        assert told["env"] == {"EVERSTREAM_A": "1"}
        assert told["folder"] == str(ROOT)
        assert told["words"] == [__file__]
        assert told["name"] == "__main__"
        assert told["threads"] == 1


def test_runs_in_another_network() -> None:
    if not can_have_namespaces():
        pytest.skip("this user may not make a network")
    name = f"everstream-forked-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with forked(network=name) as (_, told, _):
            assert told["network"] != os.readlink("/proc/self/ns/net")
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def test_has_no_descriptors_but_the_first_three() -> None:
    with forked() as (process, told, _):
        assert len(told["descriptors"]) == 3
        assert told["descriptors"][1] == os.readlink(f"/proc/self/fd/{process.stdout.fileno()}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ends_by_a_signal(number: signal.Signals) -> None:
    with forked() as (process, _, _):
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait() == process.poll() == -number
        process.kill()  # nothing: it has ended


def test_exit_code_and_standard_error_are_its_own() -> None:
    with forked("3") as (process, _, _):
        assert process.wait(60) == 3
    with forked("nothing works") as (process, _, stderr):
        assert process.wait(60) == 1
        stderr.seek(0)
        assert stderr.read() == b"nothing works\n"


def test_wait_is_bounded() -> None:
    with forked() as (process, _, _), pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)


def test_threads_may_wait_for_one_process() -> None:
    with forked() as (process, _, _), ThreadPoolExecutor() as threads:
        codes = [threads.submit(process.wait, 60) for _ in range(8)]
        process.kill()
        assert [code.result() for code in codes] == [-signal.SIGKILL] * 8
    with forked("3") as (process, _, _):
        assert process.wait(60) == 3


def test_forker_survives_a_failed_request() -> None:
    forker = Forker()
    try:
        for _ in range(2):
            with pytest.raises(ChildProcessError):
                forker.ask({"ended": os.getpid()})
    finally:
        forker.close()
    assert forker.process.returncode == 0


def test_counts_as_a_process_that_the_test_started() -> None:
    guard = Guard()
    with forked():
        pass
    with pytest.raises(pytest.fail.Exception, match=r"subprocess\.Popen"):
        guard.check(item("a.py"))


def test_forker_ends_with_its_parent() -> None:
    forker = Forker()
    forker.close()
    assert forker.process.returncode == 0


if __name__ == "__main__":
    main()
