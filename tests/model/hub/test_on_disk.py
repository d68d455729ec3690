"""The list of models on disk, and what deletes them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint import load_checkpoint
from tests.gguf_files import gguf_tensors, world_vocabulary, write_gguf
from tests.hub_server import Hub, Repository
from tests.model.hub.commands import Commands
from tests.rwkv7 import SHAPES, fla_config, fla_names, published, write_fla
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.process


def listed(everstream: Commands) -> dict[str, dict[str, Any]]:
    """The models of the hub that are on disk, by name."""
    rows = json.loads(everstream.run("models", "--json").stdout)
    return {row["name"]: row for row in rows if row["source"] == "hub"}


def test_gguf_is_pulled_alone(everstream: Commands, hub: Hub, models: Path) -> None:
    hub.add("owner/gguf", models / "gguf")
    file = everstream.pull("owner/gguf", "--file", "small-Q8_0.gguf")
    assert hub.gets() == [("small-Q8_0.gguf", 0)]
    assert load_checkpoint(file).digest == load_checkpoint(models / "gguf" / file.name).digest
    (row,) = listed(everstream).values()
    assert (row["family"], row["form"]) == ("rwkv7", "gguf")


def test_folder_of_torch_files_is_pulled_and_listed(
    everstream: Commands, hub: Hub, tmp_path: Path
) -> None:
    shape = SHAPES["square"]
    weights = fla_names(published(shape))
    write_fla(tmp_path, weights, fla_config(shape), 2, "pytorch_model.bin")
    tiny_tokenizer().save(tmp_path / "tokenizer.json")
    repository = hub.add("owner/torch", tmp_path)
    folder = everstream.pull("owner/torch")
    assert {path for path, _ in hub.gets()} == repository.files.keys()
    assert load_checkpoint(folder).digest == load_checkpoint(tmp_path).digest
    (row,) = listed(everstream).values()
    assert (row["name"], row["form"]) == ("owner/torch", "bin")


def test_all_parts_of_a_split_gguf_are_pulled_listed_and_removed(
    everstream: Commands, hub: Hub, tmp_path: Path
) -> None:
    shape = SHAPES["square"]
    fill = world_vocabulary({b + 1: bytes([b]) for b in range(256)}, shape.vocab_size)
    tensors = gguf_tensors(published(shape))
    first = write_gguf(tmp_path / "small.gguf", shape, tensors, fill=fill, split=40)
    names = [file.name for file in sorted(tmp_path.iterdir())]
    assert len(names) > 1
    hub.add("owner/split", tmp_path)
    file = everstream.pull("owner/split", "--file", names[1])
    assert [path for path, _ in hub.gets()] == names
    assert load_checkpoint(file).digest == load_checkpoint(first).digest
    ((name, row),) = listed(everstream).items()
    assert name == f"owner/split:{names[0]}"
    assert row["num_bytes"] == sum(f.stat().st_size for f in tmp_path.iterdir())
    everstream.run("models", "rm", f"owner/split:{names[0]}")
    assert listed(everstream) == {}
    everstream.pull("owner/split")
    assert [path for path, _ in hub.gets()] == names


def test_models_lists_and_removes(everstream: Commands, hub: Hub, models: Path) -> None:
    hub.add("owner/native", models / "native")
    hub.add("owner/fla", models / "fla")
    file = everstream.pull("owner/native")
    folder = everstream.pull("owner/fla", "--revision", "v1")
    rows = json.loads(everstream.run("models", "--json").stdout)
    assert rows[0]["name"] == "everstream-stories"
    assert rows[0]["source"] == "bundled"
    assert listed(everstream) == {
        "owner/fla@v1": {
            "name": "owner/fla@v1",
            "source": "hub",
            "family": "rwkv7",
            "form": "safetensors",
            "num_bytes": sum(f.stat().st_size for f in folder.glob("*.safetensors")),
            "path": str(folder),
        },
        "owner/native:small.pth": {
            "name": "owner/native:small.pth",
            "source": "hub",
            "family": "rwkv7",
            "form": "pth",
            "num_bytes": file.stat().st_size,
            "path": str(file),
        },
    }
    table = everstream.run("models").stdout.splitlines()
    assert [line.split()[0] for line in table[1:]] == [row["name"] for row in rows]
    removed = everstream.run("models", "rm", "owner/native")
    assert removed.status == 0, removed.stderr
    assert not file.exists()
    assert list(listed(everstream)) == ["owner/fla@v1"]


def test_one_file_is_removed_and_the_others_stay(everstream: Commands, hub: Hub) -> None:
    files = {"a.pth": os.urandom(5000), "b.pth": os.urandom(6000)}
    hub.repositories["owner/two"] = Repository(files)
    first, second = (everstream.pull(f"owner/two:{name}") for name in files)
    blob = first.resolve()
    removed = everstream.run("models", "rm", "owner/two:a.pth")
    assert removed.stdout == "owner/two:a.pth: 5 kB freed\n", removed.stderr
    assert not blob.exists()
    assert not first.is_symlink()
    assert second.read_bytes() == files["b.pth"]


@pytest.mark.parametrize(
    "index",
    [
        b"no JSON",
        b'{"weight_map": {"a": "sub/y.safetensors"}}',
        b'{"weight_map": {"a": "%s"}}' % (b"y" * 300),
    ],
)
def test_damaged_model_of_others_does_not_hide_the_rest(
    everstream: Commands, hub: Hub, models: Path, cache: Path, index: bytes
) -> None:
    hub.add("owner/native", models / "native")
    everstream.pull("owner/native")
    odd = cache / "hub" / "models--other--odd" / "snapshots" / ("0" * 40)
    odd.mkdir(parents=True)
    (odd / "config.json").write_text("{}")
    (odd / "model.safetensors.index.json").write_bytes(index)
    assert list(listed(everstream)) == ["owner/native:small.pth"]


def test_repository_without_a_whole_file_is_removed(
    everstream: Commands, hub: Hub, cache: Path
) -> None:
    hub.repositories["owner/big"] = Repository({"big.pth": os.urandom(5000)})
    hub.repositories["owner/big"].broken = {"big.pth": [0]}
    everstream.refused("pull", "owner/big")
    removed = everstream.run("models", "rm", "owner/big")
    assert removed.stdout == "owner/big: 0 B freed\n", removed.stderr
    assert "nothing is on disk" in everstream.refused("models", "rm", "owner/big")
    assert list((cache / "hub").glob("models--*")) == []


def test_renamed_repository_is_removed_alone(everstream: Commands, hub: Hub) -> None:
    """The one by the other name has the same commit."""
    content = os.urandom(5000)
    for name in ("owner/old", "owner/new"):
        hub.repositories[name] = Repository({"a.pth": content})
    old, new = everstream.pull("owner/old"), everstream.pull("owner/new")
    assert everstream.run("models", "rm", "owner/new").stdout == "owner/new: 5 kB freed\n"
    assert old.read_bytes() == content
    assert not new.exists()
