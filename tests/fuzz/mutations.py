"""Structural changes of files, drawn from a seeded generator: the same seed, the same file."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

#: Numbers at the edges of what formats can hold.
NUMBERS = (0, 1, 2, 127, 255, 256, 1 << 15, (1 << 16) - 1, 1 << 24, 1 << 26, (1 << 31) - 1)
NUMBERS += (1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
#: JSON texts of values; some cannot be written by `json.dumps`.
VALUES = (
    *("null", "true", "false", "-1", "0", "1", "3", "16777216", "67108864", "1e12", "1e308"),
    *("1e999", "NaN", "-Infinity", "9" * 459, "9" * 5000, '""', '"x"', '"a\\u001b[31m\\nb"'),
    *('"' + "x" * 200_000 + '"', '"\\ud800"', "[]", "[[]]", "[1, null]", "{}", '{"type": 5}'),
    *(
        '{"type": "Sequence"}',
        "[" * 400 + "]" * 400,
        "[" * 100_000,
        '{"": ' * 300 + "1" + "}" * 300,
    ),
)


def changed_bytes(data: bytes, random: Random) -> bytes:
    """A few bytes are others, are missing, or are there twice; mostly near the beginning."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        size = len(changed)
        near = random.choice((64, 512, 4096, size or 1))
        at = random.randrange(max(1, min(size, near)))
        if random.random() < 0.2:  # the directory of an archive is at the end
            at = max(0, size - 1 - at)
        match random.randrange(6):
            case 0 if size:
                changed[at] ^= 1 << random.randrange(8)
            case 1:
                width = random.choice((1, 2, 4, 8))
                number = random.choice(NUMBERS) % (1 << 8 * width)
                changed[at : at + width] = number.to_bytes(width, "little")
            case 2:
                del changed[at:]
            case 3:
                del changed[at : at + random.randrange(1, 64)]
            case 4:
                changed[at:at] = changed[at : at + random.randrange(1, 256)]
            case _:
                changed[at:at] = random.choice((b"\0", b"\xff" * 9, b"\x1b[31m", b"x" * 5000))
    return bytes(changed)


def changed_json(data: bytes, random: Random) -> bytes:
    """One value anywhere in it is another, is missing, or is under another name."""
    values = json.loads(data)
    places = list(_places(values))
    parent, key = random.choice(places[:200] if random.random() < 0.7 else places)
    mark = "<mark of a changed value>"
    match random.randrange(5):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[random.choice(("", "type", "x" * 3000, "a\nb", str(key) + "_"))] = parent[key]
        case 2:
            other, there = random.choice(places)
            parent[key] = json.loads(json.dumps(other[there]))
        case _:
            parent[key] = mark
    return json.dumps(values).replace(f'"{mark}"', random.choice(VALUES)).encode()


def _places(values: Any) -> Any:
    keys = list(values) if isinstance(values, dict) else list(range(len(values)))
    for key in keys:
        yield values, key
        if isinstance(values[key], dict | list):
            yield from _places(values[key])


def changed_text(data: bytes, random: Random) -> bytes:
    """Lines are missing, there twice, swapped, or have another word."""
    lines = data.split(b"\n")
    for _ in range(random.choice((1, 1, 3))):
        at = random.randrange(len(lines))
        match random.randrange(5):
            case 0:
                del lines[at]
                lines = lines or [b""]
            case 1:
                lines.insert(at, random.choice(lines))
            case 2:
                words = lines[at].split(b" ")
                word = random.choice(VALUES)[: random.choice((9, 200_000))].encode()
                words[random.randrange(len(words))] = word
                lines[at] = b" ".join(words)
            case 3:
                lines[at] = b"a." * random.choice((9, 5000)) + b"a = 1"
            case _:
                lines[at] = changed_bytes(lines[at], random)
    return b"\n".join(lines)


def changed_safetensors(data: bytes, random: Random) -> bytes:
    """The header has another value, and its length is right again."""
    size = int.from_bytes(data[:8], "little")
    header = changed_json(data[8 : 8 + size], random)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def changed_archive(data: bytes, random: Random) -> bytes:
    """A member is another, is missing, is there twice or compressed; the archive is whole."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = random.randrange(len(members))
    if random.random() < 0.6:  # the description
        at = next(n for n, (name, _) in enumerate(members) if name.endswith("data.pkl"))
    name, content = members[at]
    out, method = io.BytesIO(), zipfile.ZIP_STORED
    match random.randrange(6):
        case 0:
            del members[at]
        case 1:
            name = random.choice((f"{name}/../x", "/etc/passwd", "data.pkl", "x\x1b[31m"))
            members.append((name, content))
        case 2:
            method = zipfile.ZIP_DEFLATED
        case _:
            members[at] = (name, changed_bytes(content, random))
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return out.getvalue()


def not_a_file(path: Path, random: Random) -> None:
    """Something else is in the place of a file."""
    path.unlink()
    match random.randrange(5):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to("nowhere")
        case 3:
            path.symlink_to("/dev/zero")
        case _:
            path.write_bytes(b"")


Change = Callable[[bytes, Random], bytes]

#: By the end of a file's name; each format has its own changes and those of bytes.
CHANGES: dict[str, Change] = {
    ".json": changed_json,
    ".safetensors": changed_safetensors,
    ".pth": changed_archive,
    ".bin": changed_archive,
    ".st": changed_safetensors,
    ".txt": changed_text,
    ".toml": changed_text,
    ".jinja": changed_text,
}


def change(path: Path, random: Random) -> None:
    """Changes the file at ``path`` in one of the ways of its format."""
    if random.random() < 0.04:
        not_a_file(path, random)
        return
    way = CHANGES.get(path.suffix, changed_bytes)
    if random.random() < 0.3:
        way = changed_bytes
    data = path.read_bytes()
    try:
        changed = way(data, random)
    except Exception:  # it was changed before, and is no longer of its format
        changed = changed_bytes(data, random)
    path.write_bytes(changed)
