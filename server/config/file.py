"""The file of settings, ``everstream serve --config FILE``: TOML, a key for each setting."""

from __future__ import annotations

import difflib
import logging
import os
import stat
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from model.files import FileError, open_file, read_all

#: Of a file of settings.
MAX_BYTES = 1 << 20

logger = logging.getLogger("everstream.config")

#: Settings that others must not read.
SECRETS = frozenset({"api_keys", "admin_keys", "signing_key"})


class ConfigFileError(FileError):
    """A file that cannot be used. The message names it, and the key."""


def read_config_file(path: Path, names: Collection[str]) -> dict[str, Any]:
    """The settings in the file, by their ``names``; arrays are tuples.

    Raises `ConfigFileError`. A value is never part of the message.
    """
    try:
        with open_file(path.expanduser()) as file:
            mode = os.fstat(file.fileno()).st_mode
            values = tomllib.loads(read_all(file, MAX_BYTES).decode("utf-8"))
    except OSError as error:
        raise ConfigFileError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not TOML, or not UTF-8
        raise ConfigFileError(f"{path}: not TOML: {_place(error)}") from None
    _check_mode(path, mode, values.keys())
    for key in values:
        if key not in names:
            raise ConfigFileError(f"{path}: {key}: unknown setting{_similar(key, names)}")
    return {key: _plain(path, key, value) for key, value in values.items()}


def _check_mode(path: Path, mode: int, keys: Collection[str]) -> None:
    """Who can write the file decides who may administer the server."""
    if mode & stat.S_IWOTH:
        raise ConfigFileError(f"{path}: everybody may write it; chmod 600")
    if mode & (stat.S_IWGRP | stat.S_IRWXO) and not SECRETS.isdisjoint(keys):
        logger.warning("%s: has keys, and others may read or write it; chmod 600", path)


def _place(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    known = isinstance(error, tomllib.TOMLDecodeError)
    return str(error) if known else "a number is too long, or it is too deeply nested"


def _similar(key: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(key, names, 1)
    return f"; is {close[0]} meant?" if close else ""


def _plain(path: Path, key: str, value: object) -> object:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str | int | float):
        return value
    raise ConfigFileError(f"{path}: {key}: must be a string, a number, true, false or an array")
