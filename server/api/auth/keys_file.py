"""The operator's file of keys: TOML, read strictly, and not one secret in it.

A mistake ends the start, or leaves the running server as it was: the message names
the file, the key and the field, and repeats no value.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from model.files import FileError, open_file, read_all
from server.api.auth.scopes import Scope
from server.config.values import ByteCount

logger = logging.getLogger("everstream.keys")

#: Of a file; a key takes some 200.
MAX_BYTES = 1 << 22
#: No longer than that, so that no name is the hash that owns a flag's sessions.
NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"
HASH_PATTERN = r"^sha256:[0-9a-f]{64}$"
#: Who everybody is on a server without keys.
ANYONE = "anyone"

_MESSAGES = {
    "missing": "is missing",
    "extra_forbidden": "is no field of this table",
    "too_short": "must not be empty",
}


class KeysFileError(FileError):
    """A file of keys that cannot be used. The message names file, key and field."""


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)


Count = Annotated[int, Field(ge=1, le=2**53)]
CountOrNone = Annotated[int, Field(ge=0, le=2**53)]


class Limits(_Table):
    """What a tenant may have; None is no bound.

    ``max_running`` counts requests that compute or wait to, ``max_sessions`` kept
    sessions, ``max_stored_bytes`` what these have on disk.
    """

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_running: Count | None = None
    max_connections: Count | None = None
    max_sessions: CountOrNone | None = None
    max_stored_bytes: Annotated[ByteCount, Field(ge=0, le=2**53)] | None = None


class KeyEntry(_Table):
    """One ``[[key]]``: whose it is, what it may do, and the SHA-256 of the key itself."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    hash: Annotated[str, Field(pattern=HASH_PATTERN)]
    scopes: Annotated[list[Scope], Field(min_length=1)]
    limits: Limits | None = None

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.hash.removeprefix("sha256:"))


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """The keys of a file, at least one. Raises `KeysFileError`."""
    try:
        with open_file(path) as file:
            _check_mode(path, os.fstat(file.fileno()).st_mode)
            document = tomllib.loads(read_all(file, MAX_BYTES).decode())
    except OSError as error:
        raise KeysFileError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise KeysFileError(f"{path}: is not TOML in UTF-8: {_first_line(error)}") from None
    if unknown := sorted(document.keys() - {"key"}):
        raise KeysFileError(f"{path}: {unknown[0]}: is unknown; the file has [[key]] tables only")
    tables = document.get("key")
    if not isinstance(tables, list) or not tables:
        # No key at all would open the server to everybody.
        raise KeysFileError(f"{path}: has no [[key]] table")
    entries = [_entry(path, number, table) for number, table in enumerate(tables, 1)]
    _refuse_repeated_keys(path, entries)
    return tuple(entries)


def _check_mode(path: Path, mode: int) -> None:
    """Who can write the file can make an admin key; who can read it gets hashes and names.

    So the former is refused where it is everybody. The rest is a warning: Kubernetes mounts
    its secrets readable, and a shared group may be meant.
    """
    if mode & stat.S_IWOTH:
        raise KeysFileError(f"{path}: everybody may write it; chmod 600")
    if mode & (stat.S_IWGRP | stat.S_IRWXO):
        logger.warning("%s: others may read it, or its group write it; chmod 600", path)


def limits_by_name(path: Path, entries: Sequence[KeyEntry]) -> dict[str, Limits]:
    """Each tenant's limits, which one of its keys states or several alike.

    Raises `KeysFileError` where two differ: a tenant has its limits once, however
    many keys it has.
    """
    stated: dict[str, Limits] = {}
    for number, entry in enumerate(entries, 1):
        if entry.limits is None:
            continue
        if stated.setdefault(entry.name, entry.limits) != entry.limits:
            where = _where(path, number, entry.name)
            raise KeysFileError(f"{where}: limits: another key of {entry.name} has different ones")
    return {entry.name: stated.get(entry.name, Limits()) for entry in entries}


def _entry(path: Path, number: int, table: Any) -> KeyEntry:
    name = table.get("name") if isinstance(table, dict) else None
    where = _where(path, number, name)
    try:
        entry = KeyEntry.model_validate(table)
    except ValidationError as error:
        problem: Any = error.errors(include_url=False, include_input=False)[0]
        raise KeysFileError(f"{where}: {_explain(problem)}") from None
    if entry.name == ANYONE:
        raise KeysFileError(f"{where}: name: {ANYONE!r} is who everybody is without keys")
    return entry


def _refuse_repeated_keys(path: Path, entries: Sequence[KeyEntry]) -> None:
    numbers: dict[bytes, int] = {}
    for number, entry in enumerate(entries, 1):
        first = numbers.setdefault(entry.digest, number)
        if first != number:
            where = _where(path, number, entry.name)
            raise KeysFileError(f"{where}: hash: is that of key {first} as well")


def _where(path: Path, number: int, name: object) -> str:
    """Shows ``name`` only if it is one: the file's author may have mistaken the fields."""
    known = isinstance(name, str) and re.fullmatch(NAME_PATTERN, name)
    return f"{path}: key {number} ({name})" if known else f"{path}: key {number}"


def _explain(problem: Any) -> str:
    field = ".".join(str(part) for part in problem["loc"] if part != "function-before")
    message = _MESSAGES.get(problem["type"], problem["msg"])
    if problem["type"] == "string_pattern_mismatch":
        message = {
            "name": "must be 1 to 63 of a-z, 0-9, '.', '_' and '-', a letter or digit first",
            "hash": "must be sha256: and 64 hexadecimal digits in lower case",
        }[field]
    message = message.removeprefix("Value error, ").replace("Input should be ", "must be ")
    return f"{field}: {message}" if field else message


def _first_line(error: Exception) -> str:
    """Where the mistake is, without the text around it."""
    return str(error).partition("\n")[0]
