"""`everstream chat` while an answer is written: its server killed, and itself killed and restarted.

The model writes lines, each one of two by chance, until it is stopped: what was lost, came twice
or was drawn anew would make another text than the one of an undisturbed server.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import pytest

from server.api.auth import digest_of
from tests.chatty import lines_of_chance, write_chatty
from tests.reliability.servers import ROOT, ServerProcess

pytestmark = pytest.mark.process

LINE = re.compile(r"Line \d+ (?:holds|breaks)\.")
PROMPTS = {"chat": "Write lines.", "text": "Lines: <think"}
FLAGS = {"chat": (), "text": ("--text",)}
BOTH = pytest.mark.parametrize("kind", PROMPTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chatty(tmp_path_factory.mktemp("lines"), lines_of_chance())


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    store = tmp_path_factory.mktemp("store")
    flags = ("--model", model, "--threads", 1, "--dtype", "float32", "--store", store)
    with ServerProcess(*flags) as server:
        yield server


class Chat:
    """The command in a process of its own; its conversations are kept in ``folder``."""

    def __init__(self, server: ServerProcess, folder: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "server.cli.main", "chat", "--url", server.url, *flags]
        environment = {**os.environ, "XDG_STATE_HOME": str(folder), "COLUMNS": "200"}
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.output = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def type(self, *lines: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        self._process.stdin.flush()

    def read_until(self, words: str, num_lines: int = 0) -> None:
        """Reads its output until it has ``words`` and so many lines of the model."""
        assert self._process.stdout is not None
        while words not in self.output or len(self.lines) < num_lines:
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            assert read, self.output
            self.output += read.decode()

    def stop_answer(self) -> None:
        """Ctrl-C."""
        self._process.send_signal(signal.SIGINT)
        self.read_until("tokens/s")

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.communicate()

    def quit(self) -> None:
        rest, _ = self._process.communicate(b"/quit\n")
        self.output += rest.decode()
        assert self._process.returncode == 0, self.output

    @property
    def lines(self) -> list[str]:
        """Those that the model has written."""
        return LINE.findall(self.output)


def undisturbed(server: ServerProcess, kind: str, num_lines: int) -> list[str]:
    """The lines that the server writes in one go."""
    body: dict[str, object] = {"seed": 7}
    if kind == "chat":
        body |= {"input": PROMPTS[kind], "max_output_tokens": num_lines + 9, "store": False}
    else:
        body |= {"prompt": PROMPTS[kind], "max_tokens": num_lines + 9}
    route = "responses" if kind == "chat" else "completions"
    answer = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=120)
    return LINE.findall(answer.text)[:num_lines]


def sessions(server: ServerProcess) -> list[str]:
    listed = httpx.get(f"{server.url}/v1/sessions", timeout=120).json()["data"]
    return [each["session"] for each in listed]


def ask(chat: Chat, kind: str, num_lines: int = 10) -> None:
    """Asks for lines, and reads so many."""
    chat.type("/seed 7", "/tokens 4000", PROMPTS[kind])
    chat.read_until("", num_lines)


@BOTH
def test_killed_server_continues_the_answer(
    server: ServerProcess, tmp_path: Path, kind: str
) -> None:
    with Chat(server, tmp_path, *FLAGS[kind]) as chat:
        ask(chat, kind)
        server.restart()
        chat.read_until("", len(chat.lines) + 30)
        chat.stop_answer()
        assert chat.lines == undisturbed(server, kind, len(chat.lines))
        chat.quit()


@BOTH
@pytest.mark.parametrize("with_server", [False, True])
def test_killed_chat_continues_the_answer(
    server: ServerProcess, tmp_path: Path, kind: str, with_server: bool
) -> None:
    flags = ("--session", "lines", *FLAGS[kind])
    with Chat(server, tmp_path, *flags) as chat:
        ask(chat, kind)
        chat.kill()
    if with_server:
        server.restart()
    with Chat(server, tmp_path, *flags) as chat:
        chat.read_until(f"> {PROMPTS[kind]}", 40)
        chat.stop_answer()
        written = chat.lines
        assert written == undisturbed(server, kind, len(written))
        chat.quit()
    with Chat(server, tmp_path, *flags) as chat:
        chat.type("/history", "/new")
        chat.quit()
        assert "main: 1 turn" in chat.output
        assert written[0] in chat.output


def test_server_that_went_away_is_a_notice(server: ServerProcess, tmp_path: Path) -> None:
    before = sessions(server)
    with Chat(server, tmp_path) as chat:
        ask(chat, "chat")
        server.kill()
        chat.read_until("trying again")
        server.start()
        chat.read_until("", len(chat.lines) + 10)
        chat.stop_answer()
        chat.quit()
    assert sessions(server) == before  # what was stopped is kept no longer


@pytest.mark.parametrize("reason", ["store", "key"])
def test_answer_that_the_server_did_not_keep_is_written_again(
    server: ServerProcess, model: Path, tmp_path: Path, reason: str
) -> None:
    keys = tmp_path / "keys.toml"
    digest = digest_of("narrow").hex()
    scopes = '["read", "generate"]' if reason == "key" else '["read", "generate", "sessions"]'
    keys.write_text(f'[[key]]\nname = "a"\nhash = "sha256:{digest}"\nscopes = {scopes}\n')
    store = "memory" if reason == "store" else tmp_path / "store"
    flags = ("--model", model, "--threads", 1, "--dtype", "float32", "--store", store)
    with (
        ServerProcess(*flags, "--keys-file", keys) as own,
        Chat(own, tmp_path, "--api-key", "narrow") as chat,
    ):
        ask(chat, "chat")
        own.restart()
        chat.read_until("the server has lost the answer and writes it again")
        chat.output = chat.output.split("writes it again")[1]
        chat.read_until("", 20)
        chat.stop_answer()
        assert chat.lines == undisturbed(server, "chat", len(chat.lines))
        chat.quit()


def test_conversation_is_kept_by_its_name(server: ServerProcess, tmp_path: Path) -> None:
    flags = ("--session", "two")
    with Chat(server, tmp_path, *flags) as chat:
        chat.type("/system Be brief.", "/think none", "/tokens 3", "Write.", "/fork other")
        chat.type("More.")
        chat.quit()
    with Chat(server, tmp_path, *flags) as chat:
        chat.type("/branches", "/switch main", "/history")
        chat.read_until("Write.|")
        assert "other: 2 turns" in chat.output
        assert "  main: 1 turn" in chat.output
        with Chat(server, tmp_path, *flags) as second:
            second.read_until("another everstream chat has the conversation two")
    for wrong, words in (
        ("../two", "is no name"),
        ("two", "the conversation cannot have the option --text"),
    ):
        with Chat(server, tmp_path, "--session", wrong, "--text") as refused:
            refused.read_until(words)
    (file,) = (tmp_path / "everstream" / "chats").glob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600
