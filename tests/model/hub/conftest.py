"""A hub on loopback, the real commands in another process, and models as they are published."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.tokenization.world import FILE as VOCABULARY
from model.tokenization.world import WorldCodec
from tests.gguf_files import gguf_tensors, world_vocabulary, write_gguf
from tests.hub_server import Hub, hub_server
from tests.model.hub.commands import Commands, commands
from tests.rwkv7 import SHAPES, fla_config, fla_names, published, write_fla, write_pth

SHAPE = SHAPES["square"]


def write_vocabulary(folder: Path) -> None:
    """A World vocabulary of the 256 bytes alone."""
    folder.mkdir(exist_ok=True)
    codec = WorldCodec((byte + 1, bytes([byte])) for byte in range(256))
    (folder / VOCABULARY).write_text(codec.content(), encoding="utf-8")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One RWKV-7 as it is published: .pth, safetensors in two files, GGUF in two precisions."""
    root = tmp_path_factory.mktemp("models")
    weights = published(SHAPE)
    for name in ("native", "fla"):
        write_vocabulary(root / name)
        (root / name / "README.md").write_text("What this model is.")
    write_pth(root / "native" / "small.pth", weights)
    write_fla(root / "fla", fla_names(weights), fla_config(SHAPE), shards=2)
    (root / "gguf").mkdir()
    for kind in ("BF16", "Q8_0"):
        fill = world_vocabulary({b + 1: bytes([b]) for b in range(256)}, SHAPE.vocab_size)
        write_gguf(root / "gguf" / f"small-{kind}.gguf", SHAPE, gguf_tensors(weights), kind, fill)
    (root / "fla" / "pytorch_model.bin").write_bytes(bytes(9999))
    return root


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        yield server


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def process(hub: Hub, cache: Path) -> Iterator[Commands]:
    with commands(hub.environment(cache)) as running:
        yield running


@pytest.fixture
def everstream(process: Commands, hub: Hub, cache: Path) -> Commands:
    """The commands, with a hub that has no repository yet, and an empty cache."""
    hub.clear()
    shutil.rmtree(cache / "hub", ignore_errors=True)
    return process
