"""Weights by the keys, and in the forms, of published files: reverses `model.foreign.renamed`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from model.foreign.renamed import Part
from model.tensor_spec import Shape
from model.weights import Array


def published(
    weights: Mapping[str, Array],
    parts: Mapping[str, Part],
    shape_of: Callable[[str, Shape], Shape] = lambda name, shape: shape,
) -> Iterator[tuple[str, Array]]:
    """The tensors by the keys of ``parts``, float32, each read when it is its turn.

    ``shape_of`` has the shape in the file, by our name and shape.
    """
    for ours, part in parts.items():
        tensor = _stored(np.asarray(weights[ours], np.float32), part.form)
        yield part.keys[0], tensor.reshape(shape_of(ours, tensor.shape))


def _stored(tensor: Array, form: str) -> Array:
    if form == "log_negative":
        return -np.exp(tensor)
    return tensor - np.float32(1) if form == "plus_one" else tensor


def with_middle_axis(name: str, shape: Shape) -> Shape:
    """Folders have a convolution's weight as [C, 1, W]."""
    return (shape[0], 1, shape[1]) if name.endswith(".conv") else shape
