"""The short examples as a user runs them, next to a real server."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from clients.examples.frame import MAX_AT_ONCE, bits_per_byte, nearness
from clients.python import Client


def run(name: str, *arguments: str, succeeds: bool = True) -> str:
    command = [sys.executable, "-m", f"clients.examples.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == succeeds, done.stderr
    return done.stdout if succeeds else done.stderr


def test_story_continues_where_it_ended(server_url: str) -> None:
    options = ["--url", server_url, "--tokens", "12", "--seed", "1"]
    output = run("story", "Once upon", *options)
    assert output.startswith("Once upon")
    found = re.search(r"--session (\S+)", output)
    assert found is not None
    with Client(server_url, timeout_s=30) as client:
        session = client.session(found[1])
        before = session.info().position
        assert f"--session {session.id}" in run("story", "--session", session.id, *options)
        assert session.info().position == before + 12
        session.delete()


def test_example_without_a_server_is_a_message(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("text\nx\n")
    for name, arguments in (("story", []), ("frame", [str(table)])):
        complaint = run(name, *arguments, "--url", "http://127.0.0.1:1", succeeds=False)
        assert complaint.startswith(f"{name}: ")
        assert complaint.count("\n") == 1


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    texts = ["Once upon a time", "zq#7 @@@ 0x1F", "", "Once upon a time there was a girl"]
    pd.DataFrame({"number": range(4), "said": texts}).to_csv(path, index=False)
    return path


def test_frame_gets_columns_and_keeps_its_rows(server_url: str, table: Path) -> None:
    options = ["--column", "said", "--near", "Once upon a time", "--url", server_url]
    found = pd.read_csv(io.StringIO(run("frame", str(table), *options)))
    assert list(found) == ["number", "said", "bits_per_byte", "nearness"]
    assert found["bits_per_byte"].head(3).is_monotonic_decreasing
    by_number = found.set_index("number")
    assert by_number["nearness"].idxmax() == 0
    assert by_number.loc[0, "nearness"] == pytest.approx(1)
    assert by_number.loc[2].isna().all()
    out = table.with_name("out.csv")
    assert run("frame", str(table), *options, "--out", str(out)) == ""
    pd.testing.assert_frame_equal(pd.read_csv(out), found)


def test_frame_without_the_column_names_those_there_are(server_url: str, table: Path) -> None:
    assert "number, said" in run("frame", str(table), "--url", server_url, succeeds=False)


def test_texts_are_asked_in_pieces_and_keep_their_index(server_url: str) -> None:
    texts = pd.Series([f"Number {n % 3}" for n in range(2 * MAX_AT_ONCE + 1)])
    texts.index = pd.Index(range(1000, 1000 + len(texts)))
    with Client(server_url, timeout_s=60) as client:
        bits, near = bits_per_byte(client, texts), nearness(client, texts, "Number 1")
    assert (bits.index == texts.index).all()
    assert bits.groupby(texts).nunique().tolist() == [1, 1, 1]
    assert near[texts == "Number 1"].tolist() == pytest.approx([1.0] * (texts == "Number 1").sum())
