"""The tensors of a ``.pth`` file of torch, memory-mapped, without running what it pickles."""

from __future__ import annotations

import mmap
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.files import open_file
from model.tensor_spec import Shape
from model.weights import (
    FORMS,
    Array,
    CheckpointError,
    MappedWeights,
    StoredWeights,
    decoded,
    most_common_dtype,
    release_pages,
)

# -------------------------------------------------------------------------------------------------
# The pickle of a torch file: a dictionary of tensors, read without running what it names.
#
# A pickle is a program. Here the few instructions run that a dictionary of tensors needs, and
# three functions are known by name: those that make an ordered dictionary, a tensor and a
# parameter. Any other name is refused before anything is called, and none is imported.
#
# A few instructions can nest a value in itself so often that hashing or printing it never ends.
# So a value is hashed or printed only when it is known to be a string or a number.


#: Storage classes of torch -> dtype of the numbers, and what numpy reads them as.
STORAGES = {
    "torch FloatStorage": ("F32", "<f4"),
    "torch HalfStorage": ("F16", "<f2"),
    "torch BFloat16Storage": ("BF16", "<u2"),
    "torch DoubleStorage": ("F64", "<f8"),
    "torch LongStorage": ("I64", "<i8"),
    "torch IntStorage": ("I32", "<i4"),
    "torch ShortStorage": ("I16", "<i2"),
    "torch CharStorage": ("I8", "i1"),
    "torch ByteStorage": ("U8", "u1"),
    "torch BoolStorage": ("BOOL", "?"),
}
TENSOR, PARAMETER = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"
ORDERED_DICT = "collections OrderedDict"


@dataclass(frozen=True)
class _Global:
    """A name that the pickle refers to; it is never imported."""

    name: str


@dataclass(frozen=True)
class Storage:
    """One member of the archive: ``count`` numbers."""

    kind: str
    key: str
    count: int


@dataclass(frozen=True)
class Tensor:
    """A view of a storage; offset and strides count numbers."""

    storage: Storage
    offset: int
    shape: Shape
    strides: Shape


class PickleError(Exception):
    """What a pickle holds that a dictionary of tensors does not."""


def read_tensors(program: bytes) -> dict[str, Tensor]:
    """What the pickle ``program`` describes. Raises `PickleError`."""
    try:
        found = _Machine().run(program)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise PickleError(f"its pickle is damaged: {error}") from error
    if not isinstance(found, dict):
        raise PickleError(f"it holds a {type(found).__name__}, not a dictionary of tensors")
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise PickleError(f"{name!r} is not a tensor")
    return found


class _Machine:
    """Runs the instructions of pickle that build dictionaries of tensors; no other."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name == "STOP":
                return self._stack.pop()
            if opcode.name not in _INSTRUCTIONS:
                raise PickleError(
                    f"its pickle has the instruction {opcode.name}: no tensor needs it"
                )
            _INSTRUCTIONS[opcode.name](self, argument)
        raise PickleError("its pickle is cut off")

    def nothing(self, argument: Any) -> None:
        pass

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def push_global(self, name: str) -> None:
        self.push(_known(name))

    def push_stack_global(self, argument: Any) -> None:
        module, attribute = self.pop(2)
        if not isinstance(module, str) or not isinstance(attribute, str):
            raise TypeError("a name is not a string")
        self.push_global(f"{module} {attribute}")

    def push_storage(self, argument: Any) -> None:
        self.push(_storage(self.pop(1)[0]))

    def put(self, at: int) -> None:
        self._memo[at] = self._stack[-1]

    def memoize(self, argument: Any) -> None:
        self.put(len(self._memo))

    def get(self, at: int) -> None:
        self.push(self._memo[at])

    def mark(self, argument: Any) -> None:
        self._marks.append(len(self._stack))

    def pop(self, count: int) -> list[Any]:
        if count > len(self._stack):
            raise IndexError("its stack is empty")
        values = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return values

    def drop(self, argument: Any) -> None:
        self.pop(1)

    def pop_to_mark(self) -> list[Any]:
        return self.pop(len(self._stack) - self._marks.pop())

    def set_items(self, items: list[Any]) -> None:
        for key in items[::2]:
            if not isinstance(key, str):
                raise PickleError(f"a key is of type {type(key).__name__}, not a string")
        self._stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def reduce(self, argument: Any) -> None:
        function, arguments = self.pop(2)
        self.push(_FUNCTIONS[function.name](*arguments))


def _known(name: str) -> _Global:
    if name not in _FUNCTIONS and name not in STORAGES and not _is_storage(name):
        raise PickleError(
            f"its pickle would call {name.replace(' ', '.')}, which is refused:"
            " a file of weights holds tensors only"
        )
    return _Global(name)


def _is_storage(name: str) -> bool:
    return name.startswith("torch ") and name.endswith("Storage") and name[6:].isidentifier()


def _storage(reference: Any) -> Storage:
    """A storage by its persistent id: ("storage", class, key, device, count)."""
    _, kind, key, _, count = reference
    if type(count) is not int or count < 0 or not isinstance(key, str):
        raise ValueError("no storage")
    return Storage(kind.name, key, count)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, Storage) or len(shape) != len(strides):
        raise ValueError("no tensor")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("no tensor")
    return Tensor(storage, offset, tuple(shape), tuple(strides))


def _ordered_dict() -> dict[str, Any]:
    """An empty one: torch adds the items afterwards."""
    return {}


def _parameter(tensor: Any, *_: Any) -> Any:
    return tensor


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    TENSOR: _tensor,
    PARAMETER: _parameter,
    ORDERED_DICT: _ordered_dict,
}
_INSTRUCTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), _Machine.nothing),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _Machine.push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE"), _Machine.push),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "GLOBAL": _Machine.push_global,
    "STACK_GLOBAL": _Machine.push_stack_global,
    "BINPERSID": _Machine.push_storage,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    "MEMOIZE": _Machine.memoize,
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    "MARK": _Machine.mark,
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.pop(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.pop(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.pop(3))),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_to_mark())),
    "SETITEM": lambda machine, _: machine.set_items(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "REDUCE": _Machine.reduce,
    # Attributes of a dictionary, such as `_metadata`.
    "BUILD": _Machine.drop,
}


# -------------------------------------------------------------------------------------------------
# The zip archive of a ``.pth`` file, memory-mapped: where each member is, and whether it is whole.
#
# A zip archive says where a member is twice, in its directory at the end and in a header in front
# of the member. Torch reads by the directory, other programs by the headers, and damage to either
# would move a tensor onto other numbers unnoticed. So the two must agree, no member may reach into
# another one, and the checksum in the directory is compared when a member is first read.


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


# -------------------------------------------------------------------------------------------------
# Such a file is a zip archive that is not compressed: ``NAME/data.pkl`` describes a dictionary
# of tensors in the pickle format, and ``NAME/data/KEY`` holds the numbers of one storage.
# `model.weights.torch_file` reads the description and `model.weights.torch_file` the archive.
# No torch is needed.


#: Bound on the description; that of a thousand tensors takes about 0.1 MB.
_MAX_DESCRIPTION_BYTES = 1 << 24


class TorchFile(MappedWeights[Tensor]):
    """The tensors by name; numbers are read when asked for. Arrays may share the file's memory.

    The checksum of a storage is checked when it is read for the first time.
    """

    def __init__(self, path: Path) -> None:
        """Raises `CheckpointError` for what is damaged, and for a pickle that holds other things.

        Nothing but the list of tensors is read.
        """
        self._path = path
        try:
            self._archive = Archive(path)
            self._folder = _folder(self._archive)
            self._check_order()
            self._tensors = read_tensors(self._read("data.pkl"))
        except (ArchiveError, PickleError) as error:
            raise CheckpointError(f"{path}: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error
        for name, tensor in self._tensors.items():
            self._check(name, tensor)

    def release(self) -> None:
        self._archive.release()

    def _rows(self, name: str, rows: slice) -> Array:
        tensor = self._tensors[name]
        dtype, numpy_dtype = STORAGES[tensor.storage.kind]
        member = self._archive.members[self._key(tensor)]
        try:
            self._archive.check_once(member)
        except ArchiveError as error:
            raise CheckpointError(f"{self._path}: {name}: {error}") from error
        numbers = np.frombuffer(
            self._archive.bytes, numpy_dtype, tensor.storage.count, member.start
        )
        item = numbers.itemsize
        raw = np.lib.stride_tricks.as_strided(
            numbers[tensor.offset :],
            tensor.shape,
            [stride * item for stride in tensor.strides],
            writeable=False,
        )
        return decoded(raw[rows] if tensor.shape else raw, dtype)

    def is_float(self, name: str) -> bool:
        return name in self and "F" in STORAGES[self._tensors[name].storage.kind][0]

    @property
    def stored_dtype(self) -> str:
        return most_common_dtype(self.dtypes())

    def dtypes(self) -> list[tuple[str, Shape]]:
        """The dtype and the shape of each tensor."""
        return [(STORAGES[t.storage.kind][0], t.shape) for t in self._tensors.values()]

    def _check_order(self) -> None:
        there = f"{self._folder}/byteorder" in self._archive.members
        if there and self._read("byteorder") != b"little":
            raise PickleError("it was written on a machine of another byte order")

    def _read(self, name: str) -> bytes:
        member = self._archive.members[f"{self._folder}/{name}"]
        if member.is_compressed:
            raise PickleError(f"its {name} is compressed, which torch never does")
        if member.num_bytes > _MAX_DESCRIPTION_BYTES:
            raise PickleError(f"its {name} has {member.num_bytes} bytes, too many")
        self._archive.check_once(member)
        return self._archive.bytes[member.start : member.start + member.num_bytes]

    def _key(self, tensor: Tensor) -> str:
        return f"{self._folder}/data/{tensor.storage.key}"

    def _check(self, name: str, tensor: Tensor) -> None:
        """Raises `CheckpointError` where a tensor reaches beyond its storage's bytes."""
        storage = tensor.storage
        if storage.kind not in STORAGES:
            raise CheckpointError(f"{self._path}: {name} is of the unsupported {storage.kind!r}")
        member = self._archive.members.get(self._key(tensor))
        num_bytes = storage.count * np.dtype(STORAGES[storage.kind][1]).itemsize
        if member is None or member.is_compressed or member.num_bytes < num_bytes:
            raise CheckpointError(f"{self._path}: the numbers of {name} are missing or compressed")
        steps = zip(tensor.shape, tensor.strides, strict=True)
        last = tensor.offset + sum((size - 1) * stride for size, stride in steps)
        if 0 not in tensor.shape and last >= storage.count:
            raise CheckpointError(
                f"{self._path}: {name} reaches beyond its {storage.count} numbers"
            )


class TorchFiles(StoredWeights):
    """The tensors of ``pytorch_model.bin``, or of the several files that an index names."""

    def __init__(self, paths: list[Path]) -> None:
        """Raises `CheckpointError` where a file is damaged, and where two have the same key."""
        self.name = paths[0].name if len(paths) == 1 else FORMS[1][1]
        self._files = [TorchFile(path) for path in paths]
        self._places: dict[str, TorchFile] = {}
        for path, file in zip(paths, self._files, strict=True):
            for name in file:
                if name in self._places:
                    raise CheckpointError(f"{path}: the tensor {name} is in another file too")
                self._places[name] = file

    def __getitem__(self, name: str) -> Array:
        return self._places[name][name]

    def rows(self, name: str, begin: int, end: int | None) -> Array:
        return self._places[name].rows(name, begin, end)

    def release(self) -> None:
        for file in self._files:
            file.release()

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def shape(self, name: str) -> Shape:
        return self._places[name].shape(name)

    def is_float(self, name: str) -> bool:
        return self._places[name].is_float(name)

    @property
    def stored_dtype(self) -> str:
        return most_common_dtype(pair for file in self._files for pair in file.dtypes())


def _folder(archive: Archive) -> str:
    """The one folder that torch writes everything into."""
    names = archive.members
    found = [name.removesuffix("/data.pkl") for name in names if name.endswith("/data.pkl")]
    if len(found) != 1:
        raise PickleError("it is not a torch file: it has no data.pkl")
    return found[0]
