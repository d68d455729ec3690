"""Which tokens end a text, as the files next to a tokenizer say.

The ids in ``config.json`` and ``generation_config.json`` (``eos_token_id``, one or a list) and
the name in ``tokenizer_config.json`` (``eos_token``) all count: chat models often end a turn
with one token and a document with another.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.files import ConfigError, read_json

GENERATION_CONFIG = "generation_config.json"
#: Files that hold ``eos_token_id``; the first id of the first one is the main end of text.
ID_FILES = ("config.json", GENERATION_CONFIG)
NAME_FILE = "tokenizer_config.json"


@dataclass(frozen=True)
class Ends:
    """Values of ``eos_token_id`` and of ``eos_token``, each with the file that has it."""

    ids: tuple[tuple[Any, str], ...] = ()
    names: tuple[tuple[Any, str], ...] = ()


NO_ENDS = Ends()


def read_ends(folder: Path) -> Ends:
    """What the files in ``folder`` say. Raises `ConfigError` where one is not a JSON object."""
    ids = [(_value(folder / name, "eos_token_id"), name) for name in ID_FILES]
    eos_token = _value(folder / NAME_FILE, "eos_token")
    if isinstance(eos_token, dict):
        eos_token = eos_token.get("content")
    names = [(eos_token, NAME_FILE)]
    return Ends(*(tuple(pair for pair in pairs if pair[0] is not None) for pairs in (ids, names)))


def resolve(ends: Ends, vocab_size: int, id_of: Callable[[str], int | None]) -> list[int]:
    """The ids of ``ends`` in a vocabulary, without repetition.

    Raises `ConfigError` for an id or a name that the vocabulary does not have.
    """
    found: dict[int, None] = {}
    for value, file in ends.ids:
        ids = value if isinstance(value, list) and value else [value]
        if not all(type(id) is int and 0 <= id < vocab_size for id in ids):
            raise ConfigError(
                f"{file}: eos_token_id must be in 0..{vocab_size - 1}, or a list, not {value!r}"
            )
        found.update(dict.fromkeys(ids))
    for name, file in ends.names:
        id = id_of(name) if isinstance(name, str) else None
        if id is None:
            raise ConfigError(f"{file}: eos_token {name!r} is not in the tokenizer's vocabulary")
        found[id] = None
    return list(found)


def _value(path: Path, field: str) -> Any:
    """That of the file, or of its text model where a model has several."""
    if not os.path.lexists(path):
        return None
    values = read_json(path)
    text = values.get("text_config")
    value = values.get(field)
    return text.get(field) if value is None and isinstance(text, dict) else value
