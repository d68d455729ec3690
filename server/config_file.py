"""The file of settings, ``everstream serve --config FILE``: TOML, a key for each setting."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any


class ConfigFileError(ValueError):
    """A file that cannot be used. The message names it, and the key."""


def read_config_file(path: Path, names: Collection[str]) -> dict[str, Any]:
    """The settings in the file, by their ``names``; arrays are tuples.

    Raises `ConfigFileError`. A value is never part of the message.
    """
    try:
        values = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigFileError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigFileError(f"{path}: not TOML: {_place(error)}") from None
    for key in values:
        if key not in names:
            raise ConfigFileError(f"{path}: {key}: unknown setting{_similar(key, names)}")
    return {key: _plain(path, key, value) for key, value in values.items()}


def _place(error: ValueError) -> str:
    return str(error) if isinstance(error, tomllib.TOMLDecodeError) else "not UTF-8"


def _similar(key: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(key, names, 1)
    return f"; is {close[0]} meant?" if close else ""


def _plain(path: Path, key: str, value: object) -> object:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str | int | float):
        return value
    raise ConfigFileError(f"{path}: {key}: must be a string, a number, true, false or an array")
