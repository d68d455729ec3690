from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console
from typer.testing import CliRunner

from clients.cli import Chat, printable
from clients.python import Client
from server.main import app


def talk(url: str, *lines: str) -> str:
    result = CliRunner().invoke(app, ["chat", "--url", url], input="\n".join(lines))
    assert result.exit_code == 0, result.output
    return result.output


def test_answers_with_text_and_its_cost(server_url: str) -> None:
    output = talk(server_url, "/tokens 5", "/seed 1", "Once upon a time", "/quit", "never read")
    assert "tokens/s, position " in output
    assert "state 6 KiB (a KV cache: " in output
    assert "'max_tokens': 5" in output
    assert "'seed': 1" in output


def test_session_goes_on_until_new(server_url: str) -> None:
    output = talk(server_url, "/tokens 4", "/seed 1", "Once", "", "/new", "Once")
    first, second, third = (
        int(line.split("position ")[1].split(",")[0])
        for line in output.splitlines()
        if "position" in line
    )
    assert third == first < second


def test_mistakes_are_answered_and_survived(server_url: str) -> None:
    output = talk(
        server_url, "/temp hot", "/dance", "/temp 9", "Once", "/temp 1", "/tokens 3", "Once"
    )
    assert output.count("start afresh") == 2
    assert "temperature" in output
    assert "position" in output


def test_session_that_expired_is_a_message(server_url: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    with Client(server_url) as client:
        chat = Chat(client, console)

        def lines() -> Iterator[str]:
            client.session(chat.session.id).delete()
            yield from ("/tokens 3", "Once", "/new", "Once")

        chat.run(lines())
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert output.index("the session has expired") < output.index("position")


def test_text_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2J\u202eb\n\té\r") == "a[2Jb\n\té"


def test_no_server_is_a_message() -> None:
    result = CliRunner().invoke(app, ["chat", "--url", "http://127.0.0.1:1"], input="hello\n")
    assert result.exit_code == 1
    assert "everstream: no answer from http://127.0.0.1:1" in result.output.replace("\n", " ")


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
