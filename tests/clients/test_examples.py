"""The examples as a user runs them: processes of their own, next to a real durable server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import pytest

from clients.examples.follow import Memory, Usual
from clients.examples.tail import Place
from clients.python import Client
from tests.reliability.servers import ServerProcess

USUAL = "Once upon a time there was a little girl who lived in a wood.\n"
ODD = "zq#7 @@@ 0x1F !!\n"


class Server:
    """The bundled model on one store and one port."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process

    @contextmanager
    def running(self) -> Iterator[str]:
        self._process.start()
        yield self._process.url
        assert self._process.stop() == 0, self._process.log()


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    process = ServerProcess("--threads", 1, "--store", folder / "store")
    yield Server(process)
    process.close()


def example(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"clients.examples.{name}", *arguments]


def run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Follow:
    """`follow`, while the ``with`` block runs; then it is killed."""

    def __init__(self, log: Path, url: str) -> None:
        options = ["--url", url, "--interval", "0.01", "--warm-up", "10"]
        self._command = example("follow", str(log), *options)

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def message(self) -> str:
        """The next line that it prints; waits for it."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def complaint(self) -> str:
        """The next line that it prints to standard error; waits for it."""
        assert self._process.stderr is not None
        return self._process.stderr.readline()


def add(log: Path, *lines: str) -> None:
    with log.open("a") as file:
        file.writelines(lines)


def read_by(url: str) -> tuple[str, int]:
    """The one session of the server, and its tokens."""
    with Client(url, timeout_s=30) as client:
        (session,) = client.sessions()
        return session.id, session.info().position


@pytest.mark.parametrize("ending", [(), ("--ending", " The end.")], ids=["itself", "ending"])
def test_search_keeps_the_best_and_leaves_nothing_behind(
    server: Server, ending: Sequence[str]
) -> None:
    sizes = ["--keep", "2", "--forks", "3", "--tokens", "5", "--rounds", "2"]
    with server.running() as url:
        command = example("branch_search", "Once upon", *sizes, "--url", url, *ending)
        output = run(command)
        assert "the best 2 of 3" in output
        assert "the best 2 of 6" in output
        for table in output.split("round ")[1:]:
            scores = [float(score) for score in re.findall(r"(-?\d+\.\d+) ", table)]
            assert len(scores) == 2
            assert scores == sorted(scores, reverse=True)
        assert "\nOnce upon" in output
        with Client(url, timeout_s=30) as client:
            assert list(client.sessions()) == []
        assert run(command) == output  # the seed decides


def test_search_without_a_server_is_a_message() -> None:
    command = example("branch_search", "--url", "http://127.0.0.1:1")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_follow_prints_what_is_odd_and_nothing_else(server: Server, tmp_path: Path) -> None:
    log = tmp_path / "log"
    add(log, *[USUAL] * 15, ODD, *[USUAL] * 5, "\n", "no end yet")
    with server.running() as url:
        output = run(example("follow", str(log), "--once", "--warm-up", "10", "--url", url))
    (message,) = output.splitlines()
    assert message.endswith(ODD.strip())
    assert re.match(r"\d+\.\d\d bits/byte, usual \d+\.\d\d", message)


def test_follow_keeps_one_session_through_rotation_and_its_own_end(
    server: Server, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    add(log, *[USUAL] * 15, "first " + ODD)
    with server.running() as url:
        with Follow(log, url) as follow:
            assert "first" in follow.message()
            session, length = read_by(url)
            log.rename(tmp_path / "log.1")
            add(log, *[USUAL] * 5, "second " + ODD)
            assert "second" in follow.message()
        add(log, *[USUAL] * 5, "third " + ODD)
        with Follow(log, url) as follow:
            assert "third" in follow.message()
        assert read_by(url)[0] == session
        assert read_by(url)[1] > length


def test_follow_says_that_it_waits_for_a_file_that_is_not_there_yet(
    server: Server, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with server.running() as url, Follow(log, url) as follow:
        assert follow.complaint() == f"follow: waiting for the file {log}; Ctrl-C ends it\n"
        add(log, *[USUAL] * 15, ODD)
        assert ODD.strip() in follow.message()


def test_follow_survives_the_server_and_sends_no_line_twice(server: Server, tmp_path: Path) -> None:
    log, whole = tmp_path / "log", tmp_path / "whole"
    lines = [*[USUAL] * 15, "first " + ODD]
    add(log, *lines)
    with ExitStack() as stack:
        with server.running() as url:
            follow = stack.enter_context(Follow(log, url))
            assert "first" in follow.message()
            session, _ = read_by(url)
        assert "waiting for more lines" in follow.complaint()
        add(log, USUAL)
        assert "trying again" in follow.complaint()
        stack.enter_context(server.running())
        add(log, *[USUAL] * 3, "second " + ODD)
        assert "second" in follow.message()
        same, length = read_by(url)
        assert same == session
        # All of it at once, in another session, is as long.
        with Client(url, timeout_s=30) as client:
            client.session(session).delete()
        add(whole, *lines, *[USUAL] * 4, "second " + ODD)
        run(example("follow", str(whole), "--once", "--url", url))
        assert read_by(url)[1] == length


def test_line_that_was_sent_before_a_crash_is_not_read_again(
    server: Server, tmp_path: Path
) -> None:
    log, memory = tmp_path / "log", tmp_path / "log.everstream"
    add(log, USUAL, USUAL)
    with server.running() as url:
        run(example("follow", str(log), "--once", "--url", url))
        before = read_by(url)
        saved = json.loads(memory.read_text())
        saved["place"]["offset"] = len(USUAL)  # as if it had died before it could save
        memory.write_text(json.dumps(saved))
        run(example("follow", str(log), "--once", "--url", url))
        assert read_by(url) == before
        assert json.loads(memory.read_text())["place"]["offset"] == 2 * len(USUAL)


def test_session_that_is_gone_is_replaced(server: Server, tmp_path: Path) -> None:
    log = tmp_path / "log"
    add(log, USUAL)
    with server.running() as url:
        run(example("follow", str(log), "--once", "--url", url))
        old, _ = read_by(url)
        with Client(url, timeout_s=30) as client:
            client.session(old).delete()
        add(log, USUAL)
        run(example("follow", str(log), "--once", "--url", url))
        assert read_by(url)[0] != old


def test_memory_round_trips(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    assert Memory.load(file) is None
    for place in (None, Place(3, 1, 9)):
        memory = Memory("sess_1", place, Usual(4, 2.5, 0.5))
        memory.save(file)
        assert Memory.load(file) == memory
    file.write_text('{"hello": "world"}')
    with pytest.raises(ValueError, match="not written by this program"):
        Memory.load(file)


def test_usual_has_mean_and_deviation_of_the_lines() -> None:
    usual = Usual()
    for bits in (2.0, 4.0, 6.0):
        usual.add(bits)
    assert (usual.num_lines, usual.mean) == (3, 4.0)
    assert usual.deviation == pytest.approx((8 / 3) ** 0.5)
    for _ in range(5000):
        usual.add(1.0)
    assert usual.mean == pytest.approx(1.0, abs=1e-3)
    assert usual.deviation == pytest.approx(0.0, abs=0.1)
