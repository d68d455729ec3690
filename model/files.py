"""Files that users name and others wrote: opened only where they are files, refused in one line.

A pipe or a device in the place of a file would block the program or never end. So a file is opened
here without waiting for it, and only a regular one is read, up to a bound where it is read whole.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

#: Characters of an error message; of a longer one the middle is left out.
MAX_MESSAGE = 500
#: Of a config or an index; the largest that are published have some megabytes.
MAX_JSON_BYTES = 1 << 25
#: A surrogate: JSON writes some characters as two of them.
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


class FileError(ValueError):
    """A file that cannot be used. The message is one line of at most `MAX_MESSAGE` characters."""

    def __init__(self, message: object) -> None:
        super().__init__(one_line(message))


class ConfigError(FileError):
    """A configuration that cannot be a model. The message names the field."""


def one_line(message: object) -> str:
    """``message`` without control characters, cut in the middle where it is long."""
    text = str(message)
    if len(text) > MAX_MESSAGE:  # before anything is done for each character
        text = f"{text[: MAX_MESSAGE // 2]} ... {text[-MAX_MESSAGE // 4 :]}"
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(text) <= MAX_MESSAGE:
        return text
    return f"{text[: MAX_MESSAGE // 2]} ... {text[-MAX_MESSAGE // 4 :]}"


@contextmanager
def errors_in(path: Path, kind: type[FileError]) -> Iterator[None]:
    """Puts the name of a file in front of errors of ``kind`` that do not have it.

    Other errors that the values of a damaged file may cause become errors of ``kind``.
    """
    try:
        yield
    except kind as error:
        if path.name in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    except (ArithmeticError, RecursionError) as error:
        raise kind(f"{path}: a value is too large or too deeply nested: {error}") from error


def open_file(path: str | Path) -> BufferedReader:
    """Opens a regular file for reading. Raises `OSError`, for anything else as well."""
    return open(path, "rb", opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # `open` refuses a directory
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "Not a regular file", path)


def read_file(path: Path, max_bytes: int) -> bytes:
    """A whole file. Raises `OSError`, for one of more than ``max_bytes`` as well."""
    with open_file(path) as file:
        return read_all(file, max_bytes)


def read_all(file: BufferedReader, max_bytes: int) -> bytes:
    """The same of a file that is open, from where it is."""
    data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"Larger than {max_bytes:,} bytes", str(file.name))
    return data


def read_text(path: Path, max_bytes: int) -> str:
    """The same of a text in UTF-8, with line ends of one character. Raises `ValueError` too."""
    return TextIOWrapper(BytesIO(read_file(path, max_bytes)), encoding="utf-8").read()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises `ConfigError` for any other content, and `OSError`."""
    try:
        text = read_file(path, MAX_JSON_BYTES).decode()
        values = json.loads(text)
        if _HALF.search(text):  # an unpaired surrogate is not a character
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # includes a number of thousands of digits
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return values
