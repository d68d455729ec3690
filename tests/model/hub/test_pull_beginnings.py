"""What cannot be served is refused before its weights are downloaded, and folders are models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import load_checkpoint
from tests.gguf_files import gguf_tensors, write_gguf
from tests.hub_server import Hub
from tests.model.hub.commands import Commands
from tests.published_layouts import LAYOUTS
from tests.rwkv7 import SHAPES, published

pytestmark = pytest.mark.process

SHAPE = SHAPES["square"]
WRITE = {layout.name: layout.write for layout in LAYOUTS}


def edit_json(folder: Path, name: str, **fields: Any) -> None:
    values = json.loads((folder / name).read_text(encoding="utf-8"))
    (folder / name).write_text(json.dumps(values | fields), encoding="utf-8")


def without_a_tensor(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    del tensors["rwkv7.blocks.1.att.v2"]
    save_file(tensors, file)


def of_another_model(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        save_file({"transformer.wte.weight": torch.ones(9, 999)}, file)


@pytest.mark.parametrize(
    ("change", "message", "reads_header"),
    [
        (lambda f: edit_json(f, "config.json", model_type="bamba"), "bamba models", False),
        (lambda f: edit_json(f, "config.json", hidden_size=64), "hidden_size is 64", True),
        (lambda f: edit_json(f, "tokenizer.json", model={"type": "WordLevel"}), "tokenizer", False),
        (lambda f: (f / "tokenizer.json").unlink(), "there is no tokenizer.json or rwkv", False),
        (without_a_tensor, "model.safetensors lacks key 'rwkv7.blocks.1.att.v2'", True),
        (of_another_model, "model.safetensors is not an RWKV-7 model", True),
    ],
)
def test_folder_is_refused_before_its_weights(
    everstream: Commands,
    hub: Hub,
    tmp_path: Path,
    change: Callable[[Path], object],
    message: str,
    reads_header: bool,
) -> None:
    """Of the weights only the beginning is asked for."""
    folder = WRITE["RWKV project"](tmp_path / "model", SHAPE, published(SHAPE))
    change(folder)
    hub.add("owner/model", folder)
    refused = everstream.refused("inspect", "owner/model")
    assert message in refused
    assert str(tmp_path) not in refused
    assert "model.safetensors" not in {path for path, _ in hub.gets_so_far()}
    assert hub.beginnings() == (["model.safetensors"] if reads_header else [])


def test_beginning_is_not_read_to_the_end_of_the_file(
    everstream: Commands, hub: Hub, tmp_path: Path
) -> None:
    folder = WRITE["RWKV project"](tmp_path / "model", SHAPE, published(SHAPE))
    edit_json(folder, "config.json", hidden_size=64)
    file = folder / "model.safetensors"
    size = 64 << 20
    save_file(load_file(file) | {"rwkv7.x": torch.zeros(size, dtype=torch.uint8)}, file)
    hub.add("owner/model", folder)
    assert "hidden_size is 64" in everstream.refused("inspect", "owner/model")
    assert hub.cut.get(timeout=60) < size // 2


def test_gguf_is_refused_before_the_rest_of_it(
    everstream: Commands, hub: Hub, tmp_path: Path
) -> None:
    """Its tokenizer is of a kind that is not read."""
    file = tmp_path / "files" / "small-F32.gguf"
    file.parent.mkdir()
    tensors = gguf_tensors(published(SHAPE))
    write_gguf(file, SHAPE, tensors, "F32", lambda writer: writer.add_tokenizer_model("plamo2"))
    hub.add("owner/gguf", file.parent)
    assert "'plamo2' is not supported" in everstream.refused("pull", "owner/gguf")
    assert hub.gets_so_far() == []


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_is_pulled(
    everstream: Commands, hub: Hub, tmp_path: Path, layout: Any
) -> None:
    path = layout.write(tmp_path / "model", SHAPE, published(SHAPE))
    hub.add("owner/model", tmp_path / "model")
    assert load_checkpoint(everstream.pull("owner/model")).digest == load_checkpoint(path).digest


def test_folder_of_a_repository_is_a_model(everstream: Commands, hub: Hub, tmp_path: Path) -> None:
    """Named in every command, listed, and removed without what the other one needs."""
    for seed, name in enumerate(("g1-small", "g1-large")):
        WRITE["transformers-rwkv"](tmp_path / "all" / name, SHAPE, published(SHAPE, seed))
    repository = hub.add("owner/g1", tmp_path / "all")
    lines = everstream.refused("pull", "owner/g1").splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["owner/g1:g1-large", "owner/g1:g1-small"]
    folder = everstream.pull("owner/g1", "--file", "g1-small")
    assert {path for path, _ in hub.gets()} == {
        path for path in repository.files if path.startswith("g1-small/")
    }
    wanted = load_checkpoint(tmp_path / "all" / "g1-small").digest
    assert load_checkpoint(folder).digest == wanted
    large = everstream.pull("owner/g1:g1-large")
    assert hub.gets()
    for name in ("g1-small", "g1-large"):
        shown = everstream.run("inspect", f"owner/g1:{name}")
        assert shown.status == 0, shown.stderr
    assert hub.asked == []
    rows = json.loads(everstream.run("models", "--json").stdout)
    names = [row["name"] for row in rows if row["source"] == "hub"]
    assert names == ["owner/g1:g1-large", "owner/g1:g1-small"]
    assert everstream.run("models", "rm", "owner/g1:g1-large").status == 0
    assert not large.exists() or not list(large.iterdir())
    assert load_checkpoint(folder).digest == wanted
    assert "has no file 'none.pth'" in everstream.refused("pull", "owner/g1:none.pth")
    assert "a folder with config.json" in everstream.refused("pull", "owner/g1:none")
