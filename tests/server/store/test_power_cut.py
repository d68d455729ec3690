"""A power cut: what was not synced is lost, and every commit that returned is still there."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import apsw

from server.store.base import Chunk, DiskFiles
from server.store.sqlite.maintenance import problems
from server.store.sqlite.store import open_store
from tests.server.store.faults import Faults
from tests.server.store.records import IDENTITY
from tests.server.store.script import LIMITS, Script


class Disk:
    """What would be left of each file: its content as it was last synced, or nothing."""

    def __init__(self) -> None:
        self.files: dict[Path, bytes] = {}

    def sync(self, path: Path) -> None:
        self.files[path] = path.read_bytes()

    def restore(self, root: Path, to: Path) -> None:
        """A directory as the machine would find it after the cut."""
        for path, data in self.files.items():
            copy = to / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(data)


class LosingFiles(DiskFiles):
    """A new name lasts only once its directory is synced; a removal lasts at once."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._renamed: dict[Path, Path] = {}

    def write(self, path: Path, chunks: Sequence[Chunk]) -> None:
        super().write(path, chunks)
        self._disk.files[path] = b""

    def sync(self, path: Path) -> None:
        super().sync(path)
        self._disk.sync(path)

    def rename(self, path: Path, to: Path) -> None:
        super().rename(path, to)
        self._renamed[to] = path

    def sync_dir(self, path: Path) -> None:
        for to in [to for to in self._renamed if to.parent == path]:
            self._disk.files[to] = self._disk.files.pop(self._renamed.pop(to))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._disk.files.pop(path, None)


class LosingVfs(apsw.VFS):
    """SQLite's file system; `Disk` knows what it has synced."""

    def __init__(self, disk: Disk) -> None:
        self.name = f"losing-{secrets.token_hex(4)}"
        self._disk = disk
        super().__init__(self.name, "")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        return LosingFile(self._disk, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        super().xDelete(filename, syncdir)
        self._disk.files.pop(Path(filename), None)


class LosingFile(apsw.VFSFile):
    def __init__(self, disk: Disk, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        self._disk = disk
        self._path = Path(name.filename() if isinstance(name, apsw.URIFilename) else str(name))
        super().__init__("", name, flags)

    def xSync(self, flags: int) -> None:  # noqa: N802
        super().xSync(flags)
        self._disk.sync(self._path)


def test_every_commit_outlasts_a_power_cut(tmp_path: Path) -> None:
    disk, script, root = Disk(), Script(), tmp_path / "store"
    vfs = LosingVfs(disk)
    store = open_store(root, IDENTITY, limits=LIMITS, files=LosingFiles(disk), vfs=vfs.name)
    cuts: list[Path] = []

    def cut() -> None:
        cuts.append(tmp_path / f"cut-{len(cuts)}")
        disk.restore(root, cuts[-1])
        after = open_store(cuts[-1], IDENTITY, "relaxed", limits=LIMITS)
        script.check(after)
        after.close()
        assert list(problems(cuts[-1])) == []

    script.run(store, Faults(), cut)
    store.close()
    assert len(cuts) > 20
