"""Whole conversions of a tiny model, by the function that the command calls and by the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from model.checkpoint import load_checkpoint
from model.convert.linearize.conversion import Conversion, Settings, convert_to_constant
from model.convert.linearize.plan import window_plan
from model.convert.linearize.report import ABLATED, CONTROL, CONVERTED, SOURCE, Measures
from model.convert.linearize.result import load_adapter
from model.convert.linearize.source import read_source
from model.evaluation import DataError
from model.families.llama.config import LlamaConfig as Config
from model.files import ConfigError
from model.training import TrainingError
from model.training.data import Source as DataSource
from tests.model.commands import everstream, refused
from tests.model.convert.linearize.test_files import HEADS, SIZES, write_llama
from tests.model.convert.linearize.tiny import (
    BLOCK_PLAN,
    SHAPE,
    tiny_ids,
    tiny_llama,
    tiny_tokenizer,
)
from tests.requirements import needs_native

PROSE = 'The old clock on the wall told {} stories to the cat. "Listen," it said.\n\n'


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    write_llama(folder / "tiny.gguf", tiny_llama())
    for name in ("books", "stories", "valid"):
        parts = ["".join(PROSE.format(n + k) for n in range(12)) for k in range(6)]
        text = "<|endoftext|>\n".join(parts)
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    (folder / "plan.json").write_text(json.dumps(BLOCK_PLAN.to_json()), encoding="utf-8")
    return folder


def settings(work: Path, out: Path) -> Settings:
    return Settings(
        source=str(work / "tiny.gguf"),
        out=out,
        data=(DataSource(work / "books.txt"), DataSource(work / "stories.txt", 2.0)),
        valid=(work / "valid.txt",),
        state=str(work / "plan.json"),
        chat_tokens=0,
        match_tokens=5 * 64,
        tokens=8 * 115,
        ranks={"qkv": 2, "out": 2},
        window=64,
        device="cpu",
        eval_every=3,
        measures=Measures(pieces=1, length=80, recalls=2, distances=(60,)),
    )


def never() -> bool:
    return False


def after(count: int) -> Callable[[], bool]:
    """Is false so many times, and then true."""
    left = iter(range(count))
    return lambda: next(left, None) is None


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def quiet(text: str) -> None:
    pass


def test_conversion_says_what_it_takes_and_leaves_a_model_and_a_report(
    work: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    assert convert_to_constant(settings(work, tmp_path), never, said.append)
    assert "memory: about 0.4 GB" in said[0]
    assert "0 of chats, 320 of matching, 920 of distillation" in said[0]
    size = BLOCK_PLAN.state_bytes(SHAPE)
    assert f"state of a session: {size / 1e6:.2f} MB" in said[0]

    logged = lines(tmp_path / "runs" / "distil" / "log.jsonl")
    steps = [line["step"] for line in logged]
    assert [line["step"] for line in logged if "valid.txt" in line] == [3, 6, 8]
    assert steps[-1] == 8
    matched = load_adapter(tmp_path / "runs" / "match" / "adapter.safetensors")
    trained = load_adapter(tmp_path / "runs" / "distil" / "adapter.safetensors")
    assert matched.ranks == {}
    assert matched.farthest == trained.farthest == 128
    assert trained.ranks == {"qkv": 2, "out": 2}
    assert trained.plan == BLOCK_PLAN

    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert list(report["rows"]) == [SOURCE, CONTROL, CONVERTED, ABLATED]
    assert report["tokens"] == sum(line["length"] for line in logged if "length" in line)
    assert (tmp_path / "report.svg").is_file()

    shutil.copy(work / "tiny.gguf", tmp_path / "model")  # the base, which a server needs too
    served, source = load_checkpoint(tmp_path / "model"), read_source(work / "tiny.gguf")
    assert isinstance(served.config, Config)
    assert served.config.windows == BLOCK_PLAN.layers
    assert served.chat_template.source == source.checkpoint.chat_template.source
    ids = tiny_ids(60)
    with torch.no_grad():
        rounded = {name: tensor.bfloat16() for name, tensor in trained.weights.items()}
        student = replace(trained, weights=rounded).student(source.model)
        wanted = student.hidden(ids) @ source.model.head.t()
        found = served.model.parallel(ids)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_stopped_conversion_goes_on_with_the_same_bits(work: Path, tmp_path: Path) -> None:
    """Stopped after every third step of every stage."""
    whole, parts = settings(work, tmp_path / "whole"), settings(work, tmp_path / "parts")
    assert convert_to_constant(whole, never, quiet)
    num_calls = 1
    while not convert_to_constant(parts, after(3), quiet):
        num_calls += 1
    assert num_calls > 4
    for stage in ("match", "distil"):
        one, other = (
            load_file(each.out / "runs" / stage / "adapter.safetensors") for each in (whole, parts)
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    reports = [(each.out / "report.json").read_text(encoding="utf-8") for each in (whole, parts)]
    assert reports[0] == reports[1]


def test_more_tokens_continue_a_finished_conversion(work: Path, tmp_path: Path) -> None:
    first = settings(work, tmp_path)
    assert convert_to_constant(first, never, quiet)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert convert_to_constant(replace(first, tokens=10 * 115), never, quiet)
    later = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert later["tokens"] > report["tokens"]
    assert later["rows"][SOURCE] == report["rows"][SOURCE]
    assert later["rows"][CONVERTED] != report["rows"][CONVERTED]


def test_folder_of_another_conversion_is_refused_with_the_option(
    work: Path, tmp_path: Path
) -> None:
    first = settings(work, tmp_path)
    Conversion(first)
    for changes, message in (
        ({"ranks": {"qkv": 4}}, r"ranks \{'qkv': 2, 'out': 2\}, not \{'qkv': 4\}"),
        ({"seed": 3}, "seed 0, not 3"),
        ({"state": "1mb"}, "state .*plan.json', not '1mb'"),
    ):
        with pytest.raises(TrainingError, match=f"holds a conversion with {message}"):
            Conversion(replace(first, **changes))  # type: ignore[arg-type]


def test_conversion_of_an_older_version_is_refused(work: Path, tmp_path: Path) -> None:
    first = settings(work, tmp_path)
    Conversion(first)
    file = tmp_path / "conversion.json"
    before = json.loads(file.read_text(encoding="utf-8"))
    del before["lengths"]
    file.write_text(json.dumps(before), encoding="utf-8")
    with pytest.raises(TrainingError, match="holds a conversion with lengths None, not"):
        Conversion(first)


def test_more_than_the_source_sees_is_refused(work: Path, tmp_path: Path) -> None:
    plan = window_plan(SHAPE.num_layers, 4108)  # of a source that sees 4,096
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()), encoding="utf-8")
    for changes, message in (
        ({"state": str(tmp_path / "plan.json")}, "keeps 4112 tokens; the source can see 4096"),
        ({"window": 4097}, "window must be at most 4096"),
    ):
        with pytest.raises(ConfigError, match=message):
            Conversion(replace(settings(work, tmp_path / "out"), **changes))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_plan_by_the_scan_is_kept_and_fits(work: Path, tmp_path: Path) -> None:
    asked = replace(settings(work, tmp_path), state="0.02mb")
    assert convert_to_constant(asked, never, quiet)
    kl = json.loads((tmp_path / "scan.json").read_text(encoding="utf-8"))["kl"]
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["state_bytes"] <= 20_000
    layers = report["plan"]["layers"]
    assert [layer[1] == "delta" for layer in layers] == [value == max(kl) for value in kl]


@pytest.mark.parametrize("ranks", [{"qkv": 2, "down": 2}, None])
def test_merged_model_of_a_folder_is_the_student(
    work: Path, tmp_path: Path, ranks: dict[str, int] | None
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, **HEADS, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    tiny_tokenizer().save(tmp_path / "source" / "tokenizer.json")
    plan = replace(BLOCK_PLAN, layers=BLOCK_PLAN.layers[:2])
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()), encoding="utf-8")
    out = tmp_path / "out"
    asked = replace(
        settings(work, out),
        source=str(tmp_path / "source"),
        state=str(tmp_path / "plan.json"),
        ranks=ranks,
        merged=True,
    )
    assert convert_to_constant(asked, never, quiet)
    made = load_checkpoint(out / "model")
    assert isinstance(made.config, Config)
    assert made.config.constant_state
    source = read_source(tmp_path / "source")
    adapter = load_adapter(out / "runs" / "distil" / "adapter.safetensors")
    ids = tiny_ids(60)
    with torch.no_grad():
        student = adapter.student(source.model)
        wanted = (student.hidden(ids) @ source.model.head.t()).log_softmax(-1)
        found = made.model.parallel(ids)
    # The file is in bfloat16.
    torch.testing.assert_close(found.log_softmax(-1), wanted, rtol=0.02, atol=0.02)


@needs_native
def test_command_converts_and_continues(work: Path, tmp_path: Path) -> None:
    words = (
        *("convert", "--from", work / "tiny.gguf", "--to", "constant", "--out", tmp_path),
        *("--data", f"{work / 'books.txt'}:2", "--valid", work / "valid.txt"),
        *("--state", work / "plan.json", "--chat-tokens", 800, "--match-tokens", 64),
        *("--tokens", 150, "--window", 64, "--ranks", '{"qkv": 2}', "--device", "cpu"),
    )
    said = everstream(*words)
    assert "800 of chats" in said
    assert "window of equal memory, untrained" in said.replace("\n", " ")
    assert f"the model is in {tmp_path / 'model'}" in said
    assert len(list((tmp_path / "chats").glob("*.npz"))) == 1
    again = everstream(*words)
    assert f"the model is in {tmp_path / 'model'}" in again


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--steps", 5), "--steps does nothing with --to constant"),
        (("--optimizer", "muon"), "--optimizer does nothing with --to constant"),
        (("--ranks", "all"), "that needs --merged"),
        (("--ranks", '{"q": 2}'), "positive integers of qkv, out, up, down, not q: 2"),
        (("--ranks", '{"qkv": 0}'), "not qkv: 0"),
        (("--ranks", "[1]"), "--ranks must be a JSON object, or all"),
        (("--state", "0.001mb"), "--state must be at least"),
        (("--state", "1gb"), "--state must be megabytes"),
        (("--window", 0), "window must be 1 or more"),
        (("--data", "nowhere.txt"), "nowhere.txt is not a file"),
        (("--from", "everstream-stories"), "is of the family 'delta'"),
    ],
)
def test_mistake_is_one_line_and_nothing_is_written(
    work: Path, tmp_path: Path, more: tuple[object, ...], message: str
) -> None:
    out = tmp_path / "out"
    words = ("convert", "--from", work / "tiny.gguf", "--to", "constant", "--out", out)
    texts = ("--data", work / "books.txt", "--valid", work / "valid.txt", "--device", "cpu")
    assert message in refused(*words, *texts, *more)
    assert not out.exists()


def test_short_validation_text_is_refused_before_anything(work: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Once.\n\nTwice.\n", encoding="utf-8")
    asked = replace(settings(work, tmp_path / "out"), valid=(short,))
    with pytest.raises(DataError, match=r"short.txt: its first half has \d+ tokens"):
        Conversion(asked)
    assert not (tmp_path / "out").exists()


def test_options_of_constant_are_refused_with_a_mechanism(work: Path, tmp_path: Path) -> None:
    words = ("convert", "--from", work / "tiny.gguf", "--to", "performer", "--out", tmp_path)
    texts = ("--data", work / "books.txt", "--valid", work / "valid.txt")
    for option, value in (("--state", "6mb"), ("--tokens", 5), ("--chat-tokens", 5)):
        message = refused(*words, *texts, option, value)
        assert message == f"{option} does nothing with --to performer"
    twice = refused(*words, *texts, "--valid", work / "books.txt")
    assert twice == "--to performer has one --valid, not 2"


def test_chats_are_refused_where_the_template_is_unknown(work: Path, tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, **HEADS, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save(tmp_path / "tokenizer.json")
    asked = replace(settings(work, tmp_path / "out"), source=str(tmp_path), merged=True, state=None)
    with pytest.raises(ConfigError, match="--chat-tokens must be 0: the chat template is neither"):
        Conversion(replace(asked, chat_tokens=100))
    assert Conversion(replace(asked, chat_tokens=None)).chat_tokens == 0
    with pytest.raises(ConfigError, match="an adapter needs a GGUF file as its base"):
        Conversion(replace(asked, merged=False))
