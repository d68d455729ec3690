from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from clients.chat.conversation import Conversation, printable
from clients.python import Client
from server.cli.main import app


def talk(url: str, *lines: str, flags: Sequence[str] = ()) -> str:
    """The output of a chat in which these lines were typed."""
    result = CliRunner().invoke(app, ["chat", "--url", url, *flags], input="\n".join(lines))
    assert result.exit_code == 0, result.output
    return result.output


def positions(output: str) -> list[int]:
    """Those after each answer."""
    return [int(found) for found in re.findall(r"tokens/s.* position (\d+),", output)]


@pytest.fixture
def state(server_url: str) -> str:
    """What the chat says of a session's state, whatever model is served."""
    with Client(server_url) as client:
        num_bytes = client.models()[0]["everstream"]["state_bytes_per_session"]
    return f"state {num_bytes / 1024:.0f} KiB"


def test_answers_with_text_and_its_cost(server_url: str, state: str) -> None:
    output = talk(server_url, "/tokens 5", "/seed 1", "Once upon a time", "/quit", "never read")
    assert "tokens/s, first after " in output
    assert f"{state} (a KV cache: " in output
    assert "max_tokens 5, seed 1" in output


def test_model_is_named_with_its_kind_of_state(server_url: str, state: str) -> None:
    with Client(server_url) as client:
        model = client.models()[0]
    name, attention = model["id"], model["everstream"]["attention"]
    assert f"{name}: {attention} attention, {state}; /help for help" in talk(server_url)
    command = ["chat", "--url", server_url, "--model"]
    assert CliRunner().invoke(app, [*command, name], input="/quit").exit_code == 0
    refused = CliRunner().invoke(app, [*command, "everstream-none"])
    assert (refused.exit_code, refused.output.count("\n")) == (1, 1)
    assert "model" in refused.output


def test_session_continues_until_new(server_url: str) -> None:
    lines = ["/tokens 4", "/seed 1", "Once", "", "/new", "Once"]
    output = talk(server_url, *lines, flags=["--text"])  # a message may not be empty
    first, second, third = positions(output)
    assert third == first < second


def test_mistakes_are_answered_and_survived(server_url: str) -> None:
    lines = ["/temp hot", "/dance", "/temp 9", "Once", "/temp 1", "/tokens 3", "/rewind", "/undo x"]
    output = talk(server_url, *lines, "/switch nowhere", "/fork", "/load /no/such/file", "Once")
    assert "/temp needs a number" in output
    assert "there is no command /dance; /help lists them" in output
    assert "/rewind needs" in output
    assert "x is not a number of turns" in output
    assert "/switch needs one of main" in output
    assert "/fork needs a name" in output
    assert "/no/such/file: No such file or directory" in output
    assert "/temp must be 0 to 2" in output
    assert len(positions(output)) == 2  # nothing was set to what cannot be


@pytest.mark.parametrize(
    "line", ["/temp 9", "/temp nan", "/temp -1", "/top-p -1", "/tokens 0", "/seed -1", "/seed 1.5"]
)
def test_setting_that_cannot_be_is_refused_at_once(server_url: str, line: str) -> None:
    output = talk(server_url, "/tokens 3", line, "Once")
    assert re.search(rf"{line.split()[0]} (must be|needs)", output)
    assert len(positions(output)) == 1


def test_undo_rewind_and_again_remove_turns(server_url: str) -> None:
    begin = ["/tokens 4", "/seed 1", "Once", "there", "was"]
    first, second, third, again, after_undo = positions(
        talk(server_url, *begin, "/again", "/undo 2", "there")
    )
    assert first < second < third == again
    assert after_undo == second
    assert "back after turn 1, position" in talk(server_url, *begin, "/rewind 1")
    assert "back after turn 0, position 0" in talk(server_url, *begin, "/undo 9")


def test_forks_are_independent_branches(server_url: str) -> None:
    output = talk(
        server_url,
        *("/tokens 4", "/seed 1", "Once", "there"),
        *("/fork other", "was", "/switch main", "was", "/fork early 1", "there", "/branches"),
    )
    first, second, in_other, in_main, in_early = positions(output)
    assert in_other == in_main > second
    assert in_early == second > first
    assert f"  main: 3 turns, position {in_main}" in output
    assert f"* early: 2 turns, position {in_early}" in output


def test_branch_answers_as_the_original_would(server_url: str) -> None:
    output = talk(
        server_url, "/tokens 6", "/seed 1", "Once", "/fork other", "was", "/switch main", "was"
    )
    answers = re.findall(r"(?m)^(?!other|main|back)(.*)\n.*tokens/s", output)
    assert answers[-1] == answers[-2]


def test_history_shows_each_turn_and_its_place(server_url: str) -> None:
    output = talk(server_url, "/tokens 4", "Once", "there", "/history")
    first, second = positions(output)
    assert re.search(rf"  1        0 to {first} +Once\|", output)
    assert re.search(rf"  2 +{first} to {second} +there\|", output)


def test_saved_branch_continues_where_it_was(server_url: str, tmp_path: Path) -> None:
    file = tmp_path / "fox.chat"
    begin = ["/tokens 4", "/seed 1"]
    first, second = positions(talk(server_url, *begin, "Once", f"/save {file}", "there"))
    output = talk(server_url, *begin, f"/load {file}", "/history", "there")
    assert f"fox: 1 turn, position {first}" in output
    assert "Once|" in output
    assert positions(output) == [second]


def test_loaded_branch_can_go_back_before_it_was_saved(server_url: str, tmp_path: Path) -> None:
    file = tmp_path / "fox.chat"
    begin = ["/tokens 4", "/seed 1"]
    saved = talk(server_url, *begin, "Once", "there", f"/save {file}")
    assert len(positions(saved)) == 2
    undone = ["/undo", "/history", "there", "/fork early 1", "/undo 9"]
    output = talk(server_url, *begin, f"/load {file}", *undone)
    # The text is the same; what was drawn may be other tokens than the tokenizer makes of it.
    (position,) = re.findall(r"back after turn 1, position ([1-9]\d*)", output)
    assert re.search(rf"  1        0 to {position} +Once\|", output)
    assert "  2 " not in output
    (answered,) = positions(output)
    assert answered > int(position)
    assert f"early: 1 turn, position {position}" in output
    assert "back after turn 0, position 0" in output


def test_fork_can_go_back_before_it_was_made(server_url: str) -> None:
    output = talk(server_url, "/tokens 4", "Once", "there", "/fork copy", "/undo 2", "Once")
    assert "back after turn 0, position 0" in output
    assert len(positions(output)) == 3


def test_other_files_are_refused(server_url: str, tmp_path: Path) -> None:
    text, archive = tmp_path / "text", tmp_path / "archive"
    text.write_text("no archive")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("session", b"nothing signed")
        file.writestr("turns.json", "[]")
    output = talk(server_url, f"/load {text}", f"/load {archive}", "/branches")
    assert "is not a saved conversation" in output
    assert "* main" in output
    assert "archive:" not in output


def test_session_that_expired_is_a_message(server_url: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    with Client(server_url) as client:
        chat = Conversation(client, console)

        def lines() -> Iterator[str]:
            client.session(chat.branch.session.id).delete()
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
