"""What is forked is a process like any other."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.forking import ROOT, Forked
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


def test_has_no_descriptors_but_the_first_three() -> None:
    with forked() as (process, told, _):
        assert len(told["descriptors"]) == 3
        assert told["descriptors"][1] == os.readlink(f"/proc/self/fd/{process.stdout.fileno()}")


def test_counts_as_a_process_that_the_test_started() -> None:
    guard = Guard()
    with forked():
        pass
    with pytest.raises(pytest.fail.Exception, match=r"subprocess\.Popen"):
        guard.check(item("a.py"))


if __name__ == "__main__":
    main()
