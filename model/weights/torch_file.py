"""The tensors of a ``.pth`` file of torch, memory-mapped, without running anything in it.

Such a file is a zip archive that is not compressed: ``NAME/data.pkl`` describes a dictionary
of tensors in the pickle format, and ``NAME/data/KEY`` holds the numbers of one storage.
`model.weights.tensor_pickle` reads the description and `model.weights.torch_archive` the archive.
No torch is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from model.tensor_spec import Shape
from model.weights import (
    FORMS,
    Array,
    CheckpointError,
    MappedWeights,
    StoredWeights,
    decoded,
    most_common_dtype,
)
from model.weights.tensor_pickle import STORAGES, PickleError, Tensor, read_tensors
from model.weights.torch_archive import Archive, ArchiveError

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
