"""RWKV-7 files, native and GGUF, are served like any model; sessions outlive the server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from model.checkpoint import load_checkpoint
from server.cli.main import app
from server.config import ServerConfig
from tests.gguf_files import byte_level_vocabulary, gguf_tensors, write_gguf
from tests.model.commands import everstream, refused
from tests.rwkv7 import SHAPES, published, write_pth
from tests.server.served import served
from tests.tiny import tiny_tokenizer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tiny_tokenizer().save(tmp_path / "tokenizer.json")
    return write_pth(tmp_path / "small.pth", published(SHAPES["square"]))


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """The same model with its tokenizer inside."""
    shape = SHAPES["square"]
    fill = byte_level_vocabulary(tiny_tokenizer(), shape.vocab_size)
    return write_gguf(tmp_path / "small.gguf", shape, gguf_tensors(published(shape)), fill=fill)


async def test_gguf_writes_the_text_of_the_native_file(file: Path, gguf: Path) -> None:
    texts = []
    for each in (file, gguf):
        async with served(str(each), dtype="float32") as server:
            texts.append(await server.text("Once", max_tokens=12, temperature=0))
    assert texts[0] == texts[1]


async def test_q4_0_is_served_in_int4_and_a_session_continues(gguf: Path) -> None:
    shape = SHAPES["square"]
    fill = byte_level_vocabulary(tiny_tokenizer(), shape.vocab_size)
    write_gguf(gguf, shape, gguf_tensors(published(shape)), "Q4_0", fill)
    async with served(str(gguf)) as server:
        (model,) = (await server.http.get("/v1/models")).json()["data"]
        assert model["everstream"]["dtype"] == "int4"
        whole = await server.text("Once", max_tokens=24, temperature=0)
        session = (await server.http.post("/v1/sessions", json={})).json()["session"]
        parts = [await server.text("Once", max_tokens=12, temperature=0, session=session)]
        parts.append(await server.text("", max_tokens=12, temperature=0, session=session))
    assert "".join(parts) == whole
    assert everstream("generate", "--model", gguf, "--max-tokens", "4", "Once").startswith("Once")


async def test_tokenizer_may_be_elsewhere(gguf: Path, tmp_path: Path) -> None:
    shape = SHAPES["square"]
    bare = write_gguf(tmp_path / "bare.gguf", shape, gguf_tensors(published(shape)))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    tiny_tokenizer().save(elsewhere / "tokenizer.json")
    runner = CliRunner()
    result = runner.invoke(app, ["serve", "--port", "0", "--model", str(bare)])
    assert result.exit_code == 2
    assert "--tokenizer FILE" in result.output
    options = ["--tokenizer", str(elsewhere / "tokenizer.json"), "--max-tokens", "4"]
    options += ["--temperature", "0", "--dtype", "float32", "Once"]
    texts = [
        runner.invoke(app, ["generate", "--model", str(each), *options]).stdout
        for each in (bare, gguf)
    ]
    assert texts[0] == texts[1] != ""


async def test_text_is_that_of_the_model(file: Path) -> None:
    checkpoint = load_checkpoint(file)
    tokens = [checkpoint.config.bos_token_id, *checkpoint.tokenizer.encode("Once")]
    prompt = len(tokens)
    for _ in range(12):
        logits = checkpoint.model.parallel(torch.tensor([tokens]))[0, -1]
        tokens.append(int(logits[: checkpoint.tokenizer.vocab_size].argmax()))
    async with served(str(file), dtype="float32") as server:
        text = await server.text("Once", max_tokens=12, temperature=0)
        (model,) = (await server.http.get("/v1/models")).json()["data"]
    assert text == checkpoint.tokenizer.decode(tokens[prompt:])
    assert model["id"] == "small.pth"
    assert model["everstream"]["attention"] == "rwkv7"
    names = [tensor["name"] for tensor in model["everstream"]["state"]]
    assert names == ["S", "time_shift", "channel_shift"]


async def test_session_continues_after_a_restart(file: Path, tmp_path: Path) -> None:
    settings = {"store": str(tmp_path / "store"), "dtype": "float32"}
    async with served(str(file), **settings) as server:
        whole = await server.text("Once", max_tokens=20)
        session = (await server.http.post("/v1/sessions", json={})).json()["session"]
        first = await server.text("Once", session=session, max_tokens=12)
    async with served(str(file), **settings) as server:
        second = await server.text("", session=session, max_tokens=8)
    assert first + second == whole


async def test_lora_is_merged_by_every_command(file: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"blocks.{layer}.att.{name}": torch.randn(shape, generator=generator) / 4
        for layer in range(2)
        for name, shape in (
            ("output.lora_A", (8, 128)),
            ("output.lora_B", (128, 8)),
            ("receptance.disha", (16, 128)),
        )
    }
    lora = write_pth(tmp_path / "rwkv-0.pth", tensors)
    options = ("--lora", lora, "--lora-alpha", "16")
    merged = tmp_path / "merged.pth"
    float32 = ("--dtype", "float32")
    everstream("export", file, merged, "--format", "pth", *float32, *options)
    how = (*float32, "--max-tokens", "12", "--temperature", "0", "Once")
    wanted = everstream("generate", "--model", merged, *how)
    assert everstream("generate", "--model", file, *options, *how) == wanted
    assert everstream("generate", "--model", file, *how) != wanted
    (source,) = ServerConfig.load({}, model=(str(file),), lora=(lora,), lora_alpha=16.0).model
    texts = []
    for each in (source, str(merged)):
        async with served(each, dtype="float32") as server:
            texts.append(await server.text("Once", max_tokens=12, temperature=0))
    assert texts[0] == texts[1]
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a fox.\n")
    scores = [
        json.loads(everstream("eval", *words, "--data", text))["bits_per_byte"]
        for words in ((file, *options), (merged,), (file,))
    ]
    assert scores[0] == scores[1] != scores[2]
    assert "rwkv7" in everstream("inspect", file, *options)
    everstream(
        "state", "make", "--model", file, *options, "--prompt", "On", "--out", tmp_path / "s"
    )
    everstream("quantize", file, tmp_path / "folder", *options, "--dtype", "bfloat16")
    assert "does not state its alpha" in refused("generate", "--model", file, "--lora", lora, "x")


@pytest.mark.parametrize(
    ("form", "stored"), [("pth", "float32"), ("gguf", "Q8_0"), ("gguf", "Q4_0"), ("hf", "bfloat16")]
)
def test_inspect_shows_what_it_is(file: Path, tmp_path: Path, form: str, stored: str) -> None:
    out = tmp_path / ("hf" if form == "hf" else f"other.{form}")
    dtype = {"Q8_0": "q8_0", "Q4_0": "q4_0"}.get(stored, stored)
    exported = CliRunner().invoke(
        app, ["export", str(file), str(out), "--format", form, "--dtype", dtype]
    )
    assert exported.exit_code == 0, exported.output
    result = CliRunner().invoke(app, ["inspect", str(out)])
    assert result.exit_code == 0, result.output
    cells = [re.split(r"\s*[│|┃]\s*", line.strip(" │|┃")) for line in result.stdout.splitlines()]
    shown = {row[0]: row[1] for row in cells if len(row) == 2}
    weights = out if out.is_file() else out / "model.safetensors"
    assert shown["family"] == "rwkv7"
    assert (
        shown["parameters"] == f"{sum(t.numel() for t in published(SHAPES['square']).values()):,}"
    )
    assert shown["weights stored"] == f"{stored}, {weights.stat().st_size:,} bytes"
    # 2 layers of S [2, 64, 64] and two rows of 128, float32
    state = 2 * (2 * 64 * 64 + 2 * 128) * 4
    assert shown["state of a session"] == f"{state:,} bytes"
    assert shown["sessions per GiB"] == f"{2**30 // state:,}"
    assert shown["tokenizer"] == "tokenizer.json, 300 ids"
    assert shown["chat template"] == "none: each message is a paragraph"
    assert "decay_rank" in result.stdout


def test_what_is_wrong_is_one_line(file: Path) -> None:
    weights = published(SHAPES["square"])
    del weights["blocks.1.att.w0"]
    write_pth(file, weights)
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--model", str(file)])
    assert result.exit_code != 0
    assert "small.pth lacks key 'blocks.1.att.w0' (1 in all)" in " ".join(result.output.split())
    assert "Traceback" not in result.output
