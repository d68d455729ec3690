"""Files of strangers, changed at random and on purpose: they load, or one line names the file.

The long form is ``make fuzz``.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter

from tests.fuzz.files import FORMATS, SHAPE, WORLD_TOKENS, Format, world_text
from tests.fuzz.run import Fuzz, run, seeds
from tests.gguf_files import gguf_tensors, world_vocabulary, write_gguf
from tests.rwkv7 import published, write_pth

BY_NAME = {format.name: format for format in FORMATS}
WORLD = "rwkv_vocab_v20230424.txt"
#: Files that are published with models and not needed.
UNREAD = {"added_tokens.json", "special_tokens_map.json"}


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzz]:
    fuzz = Fuzz(tmp_path_factory.mktemp("files"))
    with fuzz.child:
        yield fuzz


def test_changed_files_load_or_are_refused_in_one_line(fuzz: Fuzz) -> None:
    verdict = run(fuzz, seeds(0, 8))
    assert verdict.fallen == []
    whats = {name.rpartition(" ")[2] for name in verdict.counts}
    assert whats == {"loaded", "refused"}, verdict.counts


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_what_is_not_a_file_is_refused_at_once(fuzz: Fuzz, format: Format) -> None:
    good = fuzz.folder / format.name
    for name in sorted({path.name for path in good.iterdir()} - UNREAD):
        for put in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
            folder = fuzz.copy(format)
            (folder / name).unlink()
            put(folder / name)
            what, message = fuzz.read(format, folder)
            assert what == "refused", (name, what, message)


Change = Callable[[Path], None]


def config(**values: Any) -> Change:
    return in_json("config.json", lambda found: found.update(values))


def in_json(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    def changed(folder: Path) -> None:
        values = json.loads((folder / name).read_bytes())
        change(values)
        (folder / name).write_text(json.dumps(values))

    return changed


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content) and None


def flipped_member(folder: Path) -> None:
    path = next(folder.glob("*.pth"))
    data = bytearray(path.read_bytes())
    name = data.index(path.stem.encode() + b"/data/0")
    data[name + sum(struct.unpack("<HH", data[name - 4 : name])) + 40] ^= 8
    path.write_bytes(data)


def header_elsewhere(folder: Path) -> None:
    path = next(folder.glob("*.pth"))
    data = bytearray(path.read_bytes())
    data[data.index(b"/data/0") - len(path.stem) - 2] ^= 16  # the length of the extra field
    path.write_bytes(data)


def members_at_one_place(folder: Path) -> None:
    path = next(folder.glob("*.pth"))
    data = bytearray(path.read_bytes())
    first, second = (data.rindex(b"%s/data/%d" % (path.stem.encode(), key)) for key in (0, 1))
    data[second - 4 : second] = data[first - 4 : first]
    path.write_bytes(data)


def compressed_member(folder: Path) -> None:
    path = folder / "model.pth"
    out = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    path.write_bytes(out.getvalue())


class _Call:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/everstream-ran",)


def pickle_with_a_call(folder: Path) -> None:
    write_pth(folder / "model.pth", {"emb.weight": torch.ones(2), "x": _Call()})


def gguf_token(num_bytes: int) -> Change:
    def changed(folder: Path) -> None:
        tokens = WORLD_TOKENS | {260: b"x" * num_bytes}
        fill = world_vocabulary(tokens, SHAPE.vocab_size)
        write_gguf(folder / "model.gguf", SHAPE, gguf_tensors(published(SHAPE)), "F32", fill)

    return changed


def gguf_kind(folder: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("a\x1b[31m\n" + "x" * 100_000)

    write_gguf(folder / "model.gguf", SHAPE, gguf_tensors(published(SHAPE)), "F32", fill)


def world_token(num_bytes: int) -> Change:
    def changed(folder: Path) -> None:
        line = f"260 {'x' * num_bytes!r} {num_bytes}\n".encode()
        (folder / WORLD).write_bytes(world_text() + line)

    return changed


def large_id(values: dict[str, Any]) -> None:
    values["added_tokens"].append({**values["added_tokens"][0], "id": 1 << 24, "content": "<x>"})


def steps(field: str, value: Any) -> Change:
    return in_json("tokenizer.json", lambda values: values.update({field: value}))


EXAMPLES: dict[str, tuple[str, Change, str]] = {
    "flipped bit": ("pth", flipped_member, "the checksum is wrong"),
    "flipped bit of a state": ("tuned-pth", flipped_member, "the checksum is wrong"),
    "header elsewhere": ("pth", header_elsewhere, "the checksum is wrong"),
    "two members at one place": ("pth", members_at_one_place, "contradicts"),
    "compressed": ("pth", compressed_member, "is compressed"),
    "call": ("pth", pickle_with_a_call, "would call posix.system, which is refused"),
    "token of 4 MB in GGUF": ("gguf", gguf_token(4 << 20), "is a string of"),
    "token of 16 MB in GGUF": ("gguf", gguf_token(16 << 20), "is a string of"),
    "long name with control characters": ("gguf", gguf_kind, "not supported"),
    "token of 4 MB": ("pth", world_token(4 << 20), "line 260: the token is longer than 1,024"),
    "token of 16 MB": ("pth", world_token(16 << 20), "Larger than"),
    "token of 1025 bytes": ("pth", world_token(1025), "line 260: the token is longer than 1,024"),
    "id of 16 million": ("own", in_json("tokenizer.json", large_id), "an id is not in"),
    "expand_v": ("gla", config(expand_v=67_108_864), "expand_v times 32"),
    "large expand_v": ("gla", config(expand_v=1e12), "expand_v times 32"),
    "NaN": ("gla", config(expand_k=float("nan")), "expand_k must be a number"),
    "heads": ("llama", config(num_attention_heads=1_000_000), "head_dim must be a positive"),
    "heads and their size": (
        "llama",
        config(num_attention_heads=1_000_000, head_dim=32, num_key_value_heads=1),
        "q_proj.weight is [32, 32], wanted [32000000, 32]",
    ),
    "many heads": ("own", config(num_attention_heads=1_000_000), "qkv.weight is"),
    "layers": ("own", config(num_hidden_layers=1 << 24), "too few for 16777216 layers"),
    "459 digits": ("llama", config(rope_theta=10**458), "rope_theta must be a number"),
    "5000 digits": ("own", text("config.json", '{"x": ' + "9" * 5000 + "}"), "is not JSON"),
    "types": ("own", steps("pre_tokenizer", {"no": "type"}), "is not as the format"),
    "no list": ("own", steps("pre_tokenizer", {"type": "Sequence", "pretokenizers": 5}), "format"),
    "no object": ("own", steps("decoder", {"type": "Sequence", "decoders": ["x"]}), "format"),
    "model of another type": ("own", steps("model", {"type": [1]}), "is not as the format"),
    "value of config.json": ("own", config(norm=["rms"]), "config.json: norm must be"),
    "long value": ("own", config(norm="x\x1b[2J\n" * 30_000), "config.json: norm must be"),
    "long name": ("own", config(**{"x\n" * 90_000: 1}), "config.json: unknown field"),
    "half a character": (
        "own",
        in_json("tokenizer_config.json", lambda values: values.update(eos_token="\ud800")),
        "tokenizer_config.json is not JSON",
    ),
    "nested keys": ("keys", text("keys.toml", "a = " + "[" * 5000), "keys.toml: "),
    "long number of a key": ("keys", text("keys.toml", "a = " + "9" * 5000), "keys.toml: "),
    "nested settings": ("settings", text("settings.toml", "a = " + "[" * 5000), "settings.toml: "),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_refused_in_one_line(fuzz: Fuzz, name: str) -> None:
    of, change, words = EXAMPLES[name]
    folder = fuzz.copy(BY_NAME[of])
    change(folder)
    what, message = fuzz.read(BY_NAME[of], folder)
    assert what == "refused", message
    assert words in message


@pytest.mark.parametrize("of", ["state", "session"])
def test_every_flipped_bit_of_a_state_is_refused(fuzz: Fuzz, of: str) -> None:
    folder = fuzz.copy(BY_NAME[of])
    good = (folder / "file").read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    tensor = range(8 * header, 8 * len(good), 4999)
    for bit in (*range(8 * 37, 8 * 38), *range(0, 8 * header, 23), *tensor):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        (folder / "file").write_bytes(data)
        what, message = fuzz.read(BY_NAME[of], folder)
        assert what == "refused", (bit, message)
