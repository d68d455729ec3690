"""The tensors of a ``.pth`` file of torch, memory-mapped, without running anything in it.

Such a file is a zip archive that is not compressed: ``NAME/data.pkl`` describes a dictionary
of tensors in the pickle format, and ``NAME/data/KEY`` holds the numbers of one storage.
`model.tensor_pickle` reads the description. No torch is needed.
"""

from __future__ import annotations

import mmap
import zipfile
from pathlib import Path

import numpy as np

from model.tensor_pickle import STORAGES, PickleError, Storage, Tensor, read_tensors
from model.weights import (
    Array,
    CheckpointError,
    MappedWeights,
    decoded,
    most_common_dtype,
    release_pages,
)

#: The file header of a member of a zip archive, without its name and extra field.
_HEADER_BYTES = 30
#: Bound on the description; that of a thousand tensors takes about 0.1 MB.
_MAX_DESCRIPTION_BYTES = 1 << 24


class TorchFile(MappedWeights[Tensor]):
    """The tensors by name; numbers are read when asked for. Arrays may share the file's memory."""

    def __init__(self, path: Path) -> None:
        """Raises `CheckpointError` for what is damaged, and for a pickle that holds other things.

        Nothing but the list of tensors is read.
        """
        self._path = path
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._members = {info.filename: info for info in archive.infolist()}
                self._folder = _folder(self._members)
                self._check_order(archive)
                program = self._read(archive, "data.pkl")
        except zipfile.BadZipFile as error:
            raise CheckpointError(
                f"{path} is not a zip archive of torch (torch.save of 1.6 or later): {error}"
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error
        except EOFError as error:
            raise CheckpointError(f"{path} is cut off, or states sizes beyond its end") from error
        except (PickleError, NotImplementedError, RuntimeError) as error:
            raise CheckpointError(f"{path}: {error}") from error
        try:
            self._tensors = read_tensors(program)
        except PickleError as error:
            raise CheckpointError(f"{path}: {error}") from error
        for name, tensor in self._tensors.items():
            self._check(name, tensor)

    def release(self) -> None:
        release_pages(self._bytes)

    def _rows(self, name: str, rows: slice) -> Array:
        tensor = self._tensors[name]
        dtype, numpy_dtype = STORAGES[tensor.storage.kind]
        start = self._start(tensor.storage)
        numbers = np.frombuffer(self._bytes, numpy_dtype, tensor.storage.count, start)
        item = numbers.itemsize
        raw = np.lib.stride_tricks.as_strided(
            numbers[tensor.offset :],
            tensor.shape,
            [stride * item for stride in tensor.strides],
            writeable=False,
        )
        return decoded(raw[rows] if tensor.shape else raw, dtype)

    @property
    def stored_dtype(self) -> str:
        tensors = self._tensors.values()
        return most_common_dtype((STORAGES[t.storage.kind][0], t.shape) for t in tensors)

    def _check_order(self, archive: zipfile.ZipFile) -> None:
        there = f"{self._folder}/byteorder" in self._members
        if there and self._read(archive, "byteorder") != b"little":
            raise PickleError("it was written on a machine of another byte order")

    def _read(self, archive: zipfile.ZipFile, name: str) -> bytes:
        info = self._members[f"{self._folder}/{name}"]
        if info.compress_type != zipfile.ZIP_STORED:
            raise PickleError(f"its {name} is compressed, which torch never does")
        if info.file_size > _MAX_DESCRIPTION_BYTES:
            raise PickleError(f"its {name} has {info.file_size} bytes, too many")
        return archive.read(info)

    def _check(self, name: str, tensor: Tensor) -> None:
        """Raises `CheckpointError` where a tensor reaches beyond its storage's bytes."""
        storage = tensor.storage
        if storage.kind not in STORAGES:
            raise CheckpointError(f"{self._path}: {name} is of the unsupported {storage.kind!r}")
        info = self._members.get(f"{self._folder}/data/{storage.key}")
        num_bytes = storage.count * np.dtype(STORAGES[storage.kind][1]).itemsize
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size < num_bytes:
            raise CheckpointError(f"{self._path}: the numbers of {name} are missing or compressed")
        if self._start(storage) + num_bytes > len(self._bytes):
            raise CheckpointError(f"{self._path}: the numbers of {name} are cut off")
        steps = zip(tensor.shape, tensor.strides, strict=True)
        last = tensor.offset + sum((size - 1) * stride for size, stride in steps)
        if 0 not in tensor.shape and last >= storage.count:
            raise CheckpointError(
                f"{self._path}: {name} reaches beyond its {storage.count} numbers"
            )

    def _start(self, storage: Storage) -> int:
        """Where a storage begins in the file, in bytes."""
        at = self._members[f"{self._folder}/data/{storage.key}"].header_offset
        lengths = self._bytes[at + _HEADER_BYTES - 4 : at + _HEADER_BYTES]
        name, extra = (int.from_bytes(part, "little") for part in (lengths[:2], lengths[2:]))
        return at + _HEADER_BYTES + name + extra


def _folder(members: dict[str, zipfile.ZipInfo]) -> str:
    """The one folder that torch writes everything into."""
    found = [name.removesuffix("/data.pkl") for name in members if name.endswith("/data.pkl")]
    if len(found) != 1:
        raise PickleError("it is not a torch file: it has no data.pkl")
    return found[0]
