"""A whole conversion of a tiny model by its commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from model.convert.linearize import chats as chats_module
from model.convert.linearize.commands import BOOKS, STORIES, VALID, app
from model.convert.linearize.sequences import read_shards
from tests.model.convert.linearize.test_files import write_llama
from tests.model.convert.linearize.tiny import PLAN, tiny_llama

PROSE = 'The old clock on the wall told {} stories to the cat. "Listen," it said.\n\n'


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "source").mkdir()
    (folder / "texts").mkdir()
    write_llama(folder / "source" / "tiny.gguf", tiny_llama())
    for name in (*BOOKS, STORIES, *VALID):
        parts = ["".join(PROSE.format(n + k) for n in range(40)) for k in range(6)]
        text = "<|endoftext|>\n".join(parts)
        (folder / "texts" / f"{name}.txt").write_text(text, encoding="utf-8")
    (folder / "plan.json").write_text(json.dumps(PLAN.to_json()), encoding="utf-8")
    return folder


def run(*arguments: str | Path) -> None:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_commands_convert_and_measure(work: Path) -> None:
    plan, small = work / "plan.json", '{"64": 1.0}'
    run("chats", work, "--tokens", "400", "--rows", "4", "--shard-tokens", "400")
    shard = read_shards(work / "chats")[0]
    assert 0 < len(shard.starts) <= len(shard.ids) // chats_module.MIN_CHAT

    run("match", work, "--run", "m", "--steps", "2", "--plan", plan)
    common = ("distil", work, "--run", "d", "--initial", "m", "--plan", plan, "--lengths", small)
    run(*common, "--steps", "2", "--eval-every", "2")
    run(*common, "--steps", "3", "--eval-every", "2")
    logged = lines(work / "runs" / "d" / "log.jsonl")
    assert [line["step"] for line in logged] == [1, 2, 2, 3]
    assert set(VALID) <= set(logged[2])

    out = work / "results.jsonl"
    sizes = ("--count", "2", "--length", "80", "--recalls", "2", "--distances", "300")
    for options in ((), ("--run", "d"), ("--run", "d", "--no-far"), ("--window", "1280")):
        run("evaluate", work, "--out", out, *sizes, *options)
    source, student, without, unbounded = (line["valid"]["all"] for line in lines(out))
    assert source == unbounded
    assert len({source, student, without}) == 3

    asked = work / "questions.json"
    asked.write_text(json.dumps([["Who?", "Why?"]]), encoding="utf-8")
    told = work / "answers.json"
    run("answers", work, "--run", "d", "--questions", asked, "--out", told, "--max-answer", "5")
    (chat,) = json.loads(told.read_text(encoding="utf-8"))["chats"]
    assert chat["questions"] == ["Who?", "Why?"]
    assert len(chat["answers"]) == 2
