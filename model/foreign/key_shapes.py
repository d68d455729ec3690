"""The shapes of a file's tensors by its keys, from which readers take the sizes of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping

from model.foreign.renamed import formed_shape
from model.tensor_spec import Shape
from model.weights import Array, CheckpointError, check_num_layers, shape_in


class KeyShapes:
    """The shapes in ``files``, which errors call ``name``."""

    def __init__(self, files: Mapping[str, Array], name: str) -> None:
        self._files, self.name = files, name

    def __call__(self, key: str, num_axes: int = 2) -> Shape:
        """Of a tensor that must be there with so many axes; raises `CheckpointError`."""
        if key not in self._files:
            raise CheckpointError(f"{self.name} lacks key {key!r}")
        found = shape_in(self._files, key)
        if len(found) != num_axes or 0 in found:
            raise CheckpointError(f"{self.name}: {key} is {list(found)}, wanted {num_axes} axes")
        return found

    def formed(self, key: str, form: str) -> Shape:
        """Our shape of a matrix of the `Part.form` ``form``."""
        return formed_shape(self(key), form)

    def num_layers(self, block: str) -> int:
        """How many numbers the keys have in the place of ``{}`` in ``block``.

        Raises `CheckpointError` where there are too few keys for so many layers.
        """
        pattern = re.escape(block).replace(r"\{\}", r"(\d{1,9})") + r"\."
        layers = {int(match[1]) for key in self._files if (match := re.match(pattern, key))}
        check_num_layers(len(layers), len(self._files), self.name)
        return len(layers)
