"""The parts of a split GGUF file: their names, and what their headers say of each other.

They are called ``NAME-00001-of-00003.gguf`` and so on. In each ``split.no`` counts from 0,
``split.count`` is the number of parts, and ``split.tensors.count`` that of the tensors in all of
them. The first has the other metadata.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from model.weights import CheckpointError

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
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


def check_parts(parts: Mapping[str, tuple[Mapping[str, Any], Collection[str]]]) -> None:
    """Raises `CheckpointError` where files are not all parts of one.

    ``parts`` has the metadata and the names of the tensors of each by its name, in order.
    """
    where: dict[str, str] = {}
    first, num_tensors = next((name, found[0].get(TENSORS)) for name, found in parts.items())
    for number, (name, (metadata, tensors)) in enumerate(parts.items()):
        if metadata.get(COUNT, 1) != len(parts):
            raise CheckpointError(
                f"{name}: {COUNT} is {metadata.get(COUNT)!r:.80}, its name says {len(parts)} parts"
                " (they are called NAME-00001-of-00003.gguf and so on)"
            )
        for key, wanted in ((NUMBER, number), (TENSORS, num_tensors)):
            if metadata.get(key) != wanted:
                found = f"{metadata.get(key)!r:.80}"
                raise CheckpointError(f"{name}: {key} is {found}, not {wanted} as after {first}")
        for tensor in tensors:
            if tensor in where:
                raise CheckpointError(f"{name}: the tensor {tensor} is in {where[tensor]} too")
            where[tensor] = name
    if len(where) != num_tensors:
        raise CheckpointError(
            f"{first}: {TENSORS} is {num_tensors!r:.80}, the parts have {len(where)} tensors"
        )
