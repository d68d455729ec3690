"""`everstream chat` with a model that has learnt a chat: a real RWKV-7 file that thinks first."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from clients.chat.conversation import Conversation
from clients.python import Client
from server.cli.main import app
from tests.chatty import ANSWER, THOUGHT, write_chatty
from tests.reliability.servers import ServerProcess


@pytest.fixture(scope="module")
def chatty_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = write_chatty(tmp_path_factory.mktemp("chatty"))
    flags = ("--model", model, "--threads", 1, "--dtype", "float32", "--store", "memory")
    limits = {"EVERSTREAM_MAX_TOKENS_LIMIT": "5000"}
    with ServerProcess(*flags, "--max-sessions", 8, environment=limits) as server:
        yield server.url
        assert server.stop() == 0, server.log()


def talk(url: str, *lines: str, flags: tuple[str, ...] = ()) -> str:
    """The output of a chat in which these lines were typed."""
    command = ["chat", "--url", url, *flags]
    result = CliRunner().invoke(app, command, input="\n".join(("/temp 0", *lines)))
    assert result.exit_code == 0, result.output
    return result.output


def test_model_is_described_as_one_that_answers(chatty_url: str) -> None:
    with Client(chatty_url) as client:
        (model,) = client.models()
    assert (model["everstream"]["chat"], model["everstream"]["thinking"]) == (True, True)


def test_answer_is_whole_and_the_thinking_is_dim(chatty_url: str) -> None:
    shown = io.StringIO()
    console = Console(
        file=shown, force_terminal=True, highlight=False, color_system="standard", width=200
    )
    with Client(chatty_url) as client, httpx.Client(base_url=chatty_url) as http:
        talked = Conversation(client, console, http=http)
        talked.run(iter(["/temp 0", "Count.", "/think on", "Count.", "/history"]))
    output = shown.getvalue()
    assert output.count(ANSWER) == 2
    assert f"\x1b[2m{THOUGHT}\x1b[0m\n\n{ANSWER}" in output
    assert [turn.thought for turn in talked.branch.turns] == ["", THOUGHT]
    assert [turn.answer for turn in talked.branch.turns] == [ANSWER, ANSWER]


def test_turns_can_be_taken_back_copied_and_saved(chatty_url: str, tmp_path: Path) -> None:
    file = tmp_path / "count.chat"
    output = talk(
        chatty_url,
        *("/system Be brief.", "One.", "", "Two.", "/fork other 1", "/history", "Three."),
        *("/branches", f"/save {file}", "/undo 2", "/again", f"/load {file}", "/again", "/new"),
    )
    assert output.count(ANSWER) == 4, output
    assert "main: 2 turns" in output and "* other: 2 turns" in output
    assert "back after turn 0, position 0" in output
    assert "there is no turn yet" in output
    assert "count: 2 turns" in output
    wrong = talk(chatty_url, f"/load {file}", flags=("--text",))
    assert "is of a model that answers messages" in " ".join(wrong.split())


def test_levels_are_those_of_the_api_and_errors_are_shown(chatty_url: str) -> None:
    output = talk(chatty_url, "/think hard", "/think low", "/tokens 4096", "/top-p 1", "Count.")
    assert "/think needs one of none, minimal" in output
    assert output.count(THOUGHT) == output.count(ANSWER) == 1
    refused = talk(chatty_url, "/tokens 5001", "Count.", "/history")
    assert "max_tokens" in refused and "Count.|" not in refused


def test_text_can_be_continued_all_the_same(chatty_url: str) -> None:
    output = talk(chatty_url, "/tokens 2", "User: hi\t <think", flags=("--text",))
    assert f"{THOUGHT}\n</think>" in output
    assert "/think" not in talk(chatty_url, "/help", flags=("--text",))
    assert "/think LEVEL" in talk(chatty_url, "/help")
