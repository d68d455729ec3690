"""The base of a model that is an adapter: a file that others publish, named by its hash.

``base.json`` in the model's folder names the file, and the Python package that has it, if one does.
The file lies in that folder, or below its hash in the cache of the hub's library, in the folder for
files of other programs. `model.hub.base_download` puts it there once its hash is verified, so a
file in the cache is trusted by its place and its size; one in the model's folder is hashed each
time.

What is imported here is the standard library alone: `make serve` needs this before any package is
installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model.bundled_models import bundled_models
from model.files import ConfigError, FileError, open_file, read_json

#: The description, in a model's folder.
BASE = "base.json"
#: Each field of it that is a text, and what it must be. Some become words of a command.
_FORMS = {
    "file": (r"\w[\w.+-]*\.gguf", "the name of a .gguf file"),
    "sha256": (r"[0-9a-f]{64}", "64 hexadecimal digits"),
    "name": (r"[A-Za-z0-9][A-Za-z0-9._-]*", "the name of a package"),
    "version": (r"[0-9][\w.!+]*", "a version"),
}


class BaseError(FileError):
    """A base that is missing or cannot be fetched. The message says what to do."""


@dataclass(frozen=True)
class Package:
    """A wheel of a package index that has the base inside; ``sha256`` is the wheel's."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Base:
    """A file by its name, size and hash. Without a ``package`` the user has to bring it."""

    file: str
    num_bytes: int
    sha256: str
    package: Package | None = None


def has_base(folder: Path) -> bool:
    """Whether the model in ``folder`` is an adapter over a base."""
    return (folder / BASE).is_file()


def whole_models() -> dict[str, Path]:
    """The bundled models that need no base."""
    return {name: path for name, path in bundled_models().items() if not has_base(path)}


def read_base(folder: Path) -> Base:
    """What ``base.json`` says. Raises `ConfigError` that names the field, and OSError."""
    path = folder / BASE
    values = read_json(path)
    package = values.pop("package", None)
    if package is not None:
        if not isinstance(package, dict):
            raise ConfigError(f"{path}: package must be an object, not {package!r:.80}")
        _check(path, package, ("name", "version", "sha256"), at="package.")
    _check(path, values, ("file", "sha256"), others=("bytes",))
    size = values["bytes"]
    if type(size) is not int or size < 1:
        raise ConfigError(f"{path}: bytes must be a positive integer, not {size!r:.80}")
    described = None if package is None else Package(**package)
    return Base(values["file"], size, values["sha256"], described)


def write_base(folder: Path, base: Base) -> None:
    """Writes ``base.json``. Raises OSError."""
    package = {} if base.package is None else {"package": asdict(base.package)}
    values = {"file": base.file, "bytes": base.num_bytes, "sha256": base.sha256, **package}
    (folder / BASE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def describe(path: Path, wheel: Path | None = None) -> Base:
    """The description of a file, and of a wheel that has it. Raises OSError."""
    package = None
    if wheel is not None:
        name, version = wheel.name.split("-")[:2]
        package = Package(name.replace("_", "-"), version, file_digest(wheel))
    return Base(path.name, path.stat().st_size, file_digest(path), package)


def file_digest(path: Path) -> str:
    """SHA-256 in hex. Raises OSError."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(
    path: Path,
    values: dict[str, Any],
    texts: tuple[str, ...],
    others: tuple[str, ...] = (),
    at: str = "",
) -> None:
    """Raises `ConfigError` where fields are missing or unknown, or ``texts`` of another form."""
    for name in (*texts, *others):
        if name not in values:
            raise ConfigError(f"{path} lacks {at}{name}")
    if unknown := sorted(values.keys() - {*texts, *others}):
        raise ConfigError(f"{path}: {at}{unknown[0]:.80} is unknown")
    for name in texts:
        form, what = _FORMS[name]
        if not isinstance(values[name], str) or not re.fullmatch(form, values[name], re.ASCII):
            raise ConfigError(f"{path}: {at}{name} must be {what}, not {values[name]!r:.80}")


def pull_command(folder: Path) -> str:
    """What fetches the base of the model in ``folder``."""
    name = folder.name if bundled_models().get(folder.name) == folder else str(folder)
    return f"everstream pull {name}"


def cached(base: Base) -> Path:
    """Where the base is in the cache, or would be."""
    # As in huggingface_hub.constants, which may not be installed yet.
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    assets = Path(os.environ.get("HF_ASSETS_CACHE") or f"{home}/assets").expanduser()
    return assets / "everstream" / "bases" / base.sha256 / base.file


def is_cached(base: Base) -> bool:
    """Whether the base is in the cache, whole."""
    place = cached(base)
    return place.is_file() and place.stat().st_size == base.num_bytes


def place_of(folder: Path) -> Path | None:
    """Where the base of the model in ``folder`` is on disk, if it is; its hash is not looked at.

    Raises `ConfigError` or OSError.
    """
    base = read_base(folder)
    own = folder / base.file
    if own.is_file():
        return own
    return cached(base) if is_cached(base) else None


def find_base(folder: Path) -> Path | None:
    """The same. Raises `BaseError` for another file in the base's place, too."""
    found = place_of(folder)
    if found is not None and found.parent == folder:
        stated, digest = read_base(folder).sha256, file_digest(found)
        if digest != stated:
            raise BaseError(f"{found}: its SHA-256 is {digest}, {BASE} states {stated}")
    return found


def base_of(folder: Path) -> Path:
    """The same where it has to be on disk: else `BaseError` has the command that fetches it."""
    if (found := find_base(folder)) is not None:
        return found
    base = read_base(folder)
    how = "" if base.package else f" --from {base.file}"
    raise BaseError(
        f"{folder / BASE}: the base {base.file} is not on disk; run: {pull_command(folder)}{how}"
    )


def remove(folder: Path) -> int:
    """Deletes the base from the cache; how many bytes that was. Raises `ConfigError` or OSError."""
    place = cached(read_base(folder))
    if not place.parent.is_dir():
        return 0
    freed = sum(file.stat().st_size for file in place.parent.glob("*") if file.is_file())
    shutil.rmtree(place.parent)
    return freed
