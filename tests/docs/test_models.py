"""The pages of models, families and mechanisms: their commands run, on checkpoints made here."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import arwkv7
from tests.docs.blocks import shell_lines
from tests.docs.pages import DOCS
from tests.docs.serving import EVERSTREAM, serving
from tests.forking import run
from tests.gguf_files import Fill, byte_level_vocabulary
from tests.hub_server import Repository, hub_server
from tests.hybrid_gguf import write_hybrid
from tests.hybrids import HYBRIDS
from tests.model.foreign.test_lora import write_peft
from tests.rwkv7 import SHAPES, published, write_pth
from tests.tiny import TEXT, tiny_tokenizer, write_model

pytestmark = pytest.mark.process

FAMILIES = sorted(f"models/{path.name}" for path in (DOCS / "models").glob("*.md"))
PAGES = ["models.md", "mechanisms.md", *FAMILIES]
#: The page's, made short.
SHORT = {"--steps": "2", "--vocab-size": "300"}


def vocabulary(name: str) -> Fill:
    return byte_level_vocabulary(tiny_tokenizer(), HYBRIDS[name].config.vocab_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_tokenizer().save(folder / "tokenizer.json")
    write_pth(folder / "rwkv7.pth", published(SHAPES["square"]))
    write_hybrid(folder / "qwen3.5.gguf", "qwen35-wide", fill=vocabulary("qwen35-wide"))
    write_hybrid(folder / "lfm2.gguf", "lfm2-wide", fill=vocabulary("lfm2-wide"))
    write_hybrid(folder / "granite.gguf", "granite-wide", fill=vocabulary("granite-wide"))
    write_hybrid(folder / "jamba.gguf", "jamba-wide", fill=vocabulary("jamba-wide"))
    write_hybrid(folder / "smollm2.gguf", "llama-wide", fill=vocabulary("llama-wide"))
    shape = arwkv7.SHAPES["plain"]
    tensors = arwkv7.gguf_tensors(shape, arwkv7.published(shape))
    fill = byte_level_vocabulary(tiny_tokenizer(), shape.vocab_size)
    arwkv7.write_gguf(folder / "arwkv7.gguf", shape, tensors, fill)
    for family in ("mamba2", "lfm3"):
        write_model(folder / family, attention=family)
    for name in ("book.txt", "other.txt"):
        (folder / name).write_text(TEXT * 40, encoding="utf-8")
    key = "blocks.0.att.key.lora"
    pair = {f"{key}_A": torch.ones(4, 128) / 100, f"{key}_B": torch.ones(128, 4) / 100}
    write_pth(folder / "rwkv-0.pth", pair)
    write_peft(
        folder / "adapter",
        {f"base_model.model.{name}.weight": tensor for name, tensor in pair.items()},
        {"peft_type": "LORA", "lora_alpha": 8},
    )
    return folder


@pytest.fixture(scope="module")
def environment(folder: Path) -> Iterator[dict[str, str]]:
    files = {name: (folder / name).read_bytes() for name in ("rwkv7.pth", "tokenizer.json")}
    with hub_server() as hub:
        named = {"rwkv7-g1i-1.5b-20260805-ctx16384.pth": files.pop("rwkv7.pth")}
        hub.repositories["BlinkDL/rwkv7-g1"] = Repository(files | named)
        found = {**os.environ, **hub.environment(folder / "home")}
        for file in ("rwkv7.pth rwkv7.gguf",):
            made = words_of(f"everstream export {file} --format gguf")
            assert run(made[2], made[3:], found, folder).returncode == 0
        yield found


def commands_of(name: str) -> list[str]:
    (path,) = DOCS.rglob(name)
    return [line for line in shell_lines(path) if line.startswith("everstream ")]


def words_of(command: str) -> list[str]:
    words = shlex.split(command)[1:]
    for flag, value in SHORT.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    if words[0] == "train":
        words += ["--window", "32", "--batch-size", "2", "--threads", "1"]
        if "--tokenizer" not in words:
            words += ["--vocab-size", "300"]
    if words[0] == "serve":
        words += ["--port", "0", "--store", "memory", "--threads", "1"]
    return [*EVERSTREAM, *words]


@pytest.mark.parametrize("name", PAGES)
def test_commands_run_in_the_order_of_the_page(
    name: str, folder: Path, environment: dict[str, str]
) -> None:
    for command in commands_of(name):
        words = words_of(command)
        if "serve" in words:
            with serving(words, folder, environment):
                continue
        done = run(words[2], words[3:], environment, folder)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_pages_have_commands_of_every_kind() -> None:
    commands = [command for name in PAGES for command in commands_of(name)]
    kinds = {re.split(r"\s+", command)[1] for command in commands}
    assert {"pull", "inspect", "serve", "generate", "state", "train", "export"} <= kinds
