"""A folder's weights in torch's own files: ``pytorch_model.bin``, or several with an index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from model.tensor_spec import Shape
from model.torch_file import TorchFile
from model.weights import FORMS, Array, CheckpointError, StoredWeights, most_common_dtype


class TorchFiles(StoredWeights):
    """The tensors of several files, each of which is in one of them."""

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
