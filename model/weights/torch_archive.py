"""The zip archive of a ``.pth`` file, memory-mapped: where each member is, and whether it is whole.

A zip archive says where a member is twice, in its directory at the end and in a header in front
of the member. Torch reads by the directory, other programs by the headers, and damage to either
would move a tensor onto other numbers unnoticed. So the two must agree, no member may reach into
another one, and the checksum in the directory is compared when a member is first read.
"""

from __future__ import annotations

import mmap
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from model.files import open_file
from model.weights import release_pages

#: Signature, version, flags, method, time, date, CRC, two sizes, and the lengths of what follows.
_HEADER = struct.Struct("<4sHHHHHIIIHH")
_SIGNATURE = b"PK\x03\x04"
_ENCRYPTED, _SIZES_FOLLOW = 1, 8
#: In the place of a size: it is in the extra field.
_ZIP64 = 0xFFFF_FFFF
#: Bytes whose checksum is computed before they are released.
_CHUNK = 1 << 24


class ArchiveError(Exception):
    """What is wrong with an archive."""


@dataclass(frozen=True)
class Member:
    """A file of the archive; ``start`` is that of its bytes."""

    name: str
    start: int
    num_bytes: int
    crc: int
    is_compressed: bool


class Archive:
    """The members by name. ``bytes`` is the whole file."""

    def __init__(self, path: Path) -> None:
        """Raises `ArchiveError` and `OSError`. No member is read."""
        try:
            with open_file(path) as file, zipfile.ZipFile(file) as archive:
                self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                infos, end = archive.infolist(), archive.start_dir
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise ArchiveError(
                f"it is not a zip archive of torch (torch.save of 1.6 or later): {error}"
            ) from error
        if len(infos) != len({info.filename for info in infos}):
            raise ArchiveError("its directory has a name twice")
        self.members = {info.filename: self._member(info, end) for info in infos}
        # Torch omits them where it is configured to: torch.serialization.set_crc32_options.
        self._has_checksums = any(info.CRC for info in infos)
        self._checked: set[str] = set()
        self._refuse_overlaps({info.filename: info.header_offset for info in infos})

    def check_once(self, member: Member) -> None:
        """Raises `ArchiveError` where the bytes of a member are not those of its checksum."""
        if member.name in self._checked or not self._has_checksums:
            return
        crc, end = 0, member.start + member.num_bytes
        with memoryview(self.bytes) as view:
            for at in range(member.start, end, _CHUNK):
                crc = zlib.crc32(view[at : min(at + _CHUNK, end)], crc)
                if at + _CHUNK < end:
                    self.release()
        if crc != member.crc:
            raise ArchiveError(f"its member {member.name} is damaged: the checksum is wrong")
        self._checked.add(member.name)

    def release(self) -> None:
        """Takes what was read out of the process's memory; it stays mapped."""
        release_pages(self.bytes)

    def _member(self, info: zipfile.ZipInfo, end: int) -> Member:
        """What the header in front of a member says too; members are in front of ``end``."""
        name, at = info.filename, info.header_offset
        header = self.bytes[at : at + _HEADER.size] if at >= 0 else b""
        if len(header) < _HEADER.size or not header.startswith(_SIGNATURE):
            raise ArchiveError(f"its member {name} is cut off, or not where its directory says")
        _, _, flags, method, _, _, crc, packed, size, len_name, len_extra = _HEADER.unpack(header)
        start = at + _HEADER.size + len_name + len_extra
        if start + info.compress_size > end:
            raise ArchiveError(f"it is cut off, or states sizes beyond its end: {name}")
        given = self.bytes[at + _HEADER.size : at + _HEADER.size + len_name]
        wanted = {info.orig_filename.encode(code, "replace") for code in ("utf-8", "cp437")}
        stated = [(crc, info.CRC), (packed, info.compress_size), (size, info.file_size)]
        if given not in wanted or flags != info.flag_bits or method != info.compress_type:
            raise ArchiveError(f"its member {name} has a header that its directory contradicts")
        left_out = (0, _ZIP64) if flags & _SIZES_FOLLOW else (_ZIP64,)
        if any(found not in (there, *left_out) for found, there in stated):
            raise ArchiveError(f"its member {name} has a header that its directory contradicts")
        is_stored = method == zipfile.ZIP_STORED
        if flags & _ENCRYPTED or (is_stored and info.compress_size != info.file_size):
            raise ArchiveError(f"its member {name} is encrypted, or its sizes differ")
        return Member(name, start, info.compress_size, info.CRC, not is_stored)

    def _refuse_overlaps(self, headers: dict[str, int]) -> None:
        """Raises `ArchiveError` for bytes of two members; ``headers`` is where theirs begin."""
        last, before = 0, ""
        for name in sorted(headers, key=lambda name: headers[name]):
            if headers[name] < last:
                raise ArchiveError(f"its members {before} and {name} overlap")
            last, before = self.members[name].start + self.members[name].num_bytes, name
