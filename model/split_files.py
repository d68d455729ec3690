"""The names of a split GGUF file's parts: ``NAME-00001-of-00003.gguf`` and so on."""

from __future__ import annotations

import re
from pathlib import Path

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
#: More parts than this are not looked for.
MAX_PARTS = 1024


def part_names(path: str) -> list[str]:
    """The paths of all parts in order, given that of any; else ``path`` alone."""
    found = _PART.fullmatch(path)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]) <= MAX_PARTS:
        return [path]
    stem, count = found["stem"], int(found["count"])
    return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def part_paths(path: Path) -> list[Path]:
    """The same of a file's path."""
    return [path.with_name(name) for name in part_names(path.name)]


def is_first_part(path: str) -> bool:
    """Whether it is a file of one part, or the first of several."""
    return part_names(path)[0] == path
