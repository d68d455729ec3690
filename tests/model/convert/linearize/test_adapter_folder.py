"""From a run to the model that is served: the same logits, and a base that is the source."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from model.architectures.hybrid import SINKS
from model.checkpoint import load_checkpoint
from model.convert.linearize.__main__ import app
from model.convert.linearize.plan import Plan
from model.convert.linearize.result import Adapter, save_adapter
from model.convert.linearize.source import Llama, read_source
from model.convert.linearize.student import Student
from model.families.llama.config import LayerPlan
from model.files import ConfigError
from model.hub.base import file_digest, read_base
from tests.adapted import write_wheel
from tests.model.convert.linearize.test_files import write_llama
from tests.model.convert.linearize.tiny import tiny_ids, tiny_llama

#: A layer of each kind. First tokens and windows fill blocks of positions.
PLAN = Plan((LayerPlan(12, "relative", 12), LayerPlan(28, "delta", 8), LayerPlan(12)), SINKS)


def trained(source: Llama, farthest: int = 0) -> Student:
    """A student all of whose weights are random, and numbers of bfloat16."""
    generator = torch.Generator().manual_seed(3)
    student = Student(source, PLAN, {"qkv": 2, "out": 3, "up": 2, "down": 2}, farthest)
    student.init_weights(generator)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter.bfloat16().float())
    return student


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A conversion with a run."""
    folder = tmp_path / "work"
    (folder / "source").mkdir(parents=True)
    (folder / "runs" / "last").mkdir(parents=True)
    gguf = write_llama(folder / "source" / "tiny.gguf", tiny_llama())
    student = trained(read_source(gguf).model)
    weights = {name: parameter.detach() for name, parameter in student.named_parameters()}
    adapter = Adapter(file_digest(gguf), PLAN, student.ranks, 64, weights, {})
    save_adapter(folder / "runs" / "last" / "adapter.safetensors", adapter)
    return folder


def adapter_of(work: Path) -> tuple[object, ...]:
    """The beginning of the command."""
    source = work / "source" / "tiny.gguf"
    return "adapter", source, work / "runs" / "last" / "adapter.safetensors"


def test_served_model_has_the_logits_of_the_student(work: Path, tmp_path: Path) -> None:
    """Also of tokens that are farther from the first ones than these are seen."""
    out, gguf = tmp_path / "served", work / "source" / "tiny.gguf"
    wheel = write_wheel(tmp_path / "index", gguf)
    words = [*adapter_of(work), out]
    result = CliRunner().invoke(app, [str(word) for word in (*words, "--wheel", wheel)])
    assert result.exit_code == 0, (result.output, result.exception)
    package = read_base(out).package
    assert package is not None
    assert (package.name, package.version) == ("tiny-base", "1.0")
    assert package.sha256 == file_digest(wheel)

    shutil.copy(gguf, out)
    served, source = load_checkpoint(out), read_source(gguf)
    assert served.config.max_context == 64
    assert served.tokenizer.encode("a") == source.tokenizer.encode("a")
    ids = tiny_ids(100)
    with torch.no_grad():
        expected = trained(source.model, 64).hidden(ids) @ source.model.head.T
        unbound = trained(source.model).hidden(ids) @ source.model.head.T
        logits = served.model.parallel(ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert (unbound - expected)[:, 64:].abs().max() > 0.01


def test_wheel_that_has_another_file_is_refused(work: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "tiny.gguf", tiny_llama(seed=1))
    wheel = write_wheel(tmp_path / "index", other)
    words = [*adapter_of(work), tmp_path / "out", "--wheel", wheel]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert "is not the base" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_run_over_another_source_is_refused(work: Path, tmp_path: Path) -> None:
    write_llama(work / "source" / "tiny.gguf", tiny_llama(seed=1))
    words = [*adapter_of(work), tmp_path / "out"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(result.exception, ConfigError)
    assert "is not over tiny.gguf: the base's hash differs" in str(result.exception)
