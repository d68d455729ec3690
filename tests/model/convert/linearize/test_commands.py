"""What measures a conversion that was made."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from typer.testing import CliRunner

from model.convert.linearize.__main__ import app
from model.convert.linearize.result import Adapter, save_adapter
from model.convert.linearize.student import Student
from model.hub.base import file_digest
from tests.model.convert.linearize.test_files import write_llama
from tests.model.convert.linearize.tiny import PLAN, tiny_llama

ROOT = Path(__file__).parents[4]


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_page_has_the_costs_that_are_computed() -> None:
    page = (ROOT / "docs" / "contribute" / "convert-llama.md").read_text(encoding="utf-8")
    table = page.split("<!-- costs -->")[1].split("<!-- end of costs -->")[0].strip()
    assert run("costs").strip() == table


def test_adapter_of_a_run_is_measured_and_answers(tmp_path: Path) -> None:
    source, adapter = write_llama(tmp_path / "tiny.gguf", tiny_llama()), tmp_path / "a.safetensors"
    student = Student(tiny_llama(), PLAN, {"qkv": 2})
    student.init_weights(torch.Generator().manual_seed(0))
    made = Adapter(
        file_digest(source), PLAN, {"qkv": 2}, 64, dict(student.state_dict()), {"tokens": 7}
    )
    save_adapter(adapter, made)
    text = tmp_path / "valid.txt"
    text.write_text("The old clock told a story.\n\n" * 60, encoding="utf-8")
    sizes = ("--pieces", 1, "--length", 80, "--recalls", 1)
    run("report", source, adapter, tmp_path / "out", "--valid", text, *sizes)
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["tokens"] == 7
    assert len(report["rows"]) == 4

    asked = tmp_path / "questions.json"
    asked.write_text(json.dumps([["Who?", "Why?"]]), encoding="utf-8")
    told = tmp_path / "answers.json"
    for more in ((), ("--adapter", adapter)):
        run("answers", source, "--questions", asked, "--out", told, "--max-answer", 5, *more)
        (chat,) = json.loads(told.read_text(encoding="utf-8"))["chats"]
        assert chat["questions"] == ["Who?", "Why?"]
        assert len(chat["answers"]) == 2
