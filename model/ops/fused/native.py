"""When the kernels of the extension may take the place of the definitions in torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

try:
    from model.ops.cpu._native import Training as Training
except ImportError:  # no compiler where this was installed
    Training = None  # type: ignore[assignment,misc]

#: Not empty within `without_kernels`.
_set_aside: list[bool] = []

_LOW_OR_SINGLE = (torch.float32, torch.bfloat16)


def kernels_for(dtype: torch.dtype, *tensors: Tensor) -> Training | None:
    """The kernels if they apply to these arguments of an operation, else None.

    ``dtype`` is that of the activations, float32 or bfloat16; each of ``tensors`` must have it or
    be float32. All are on the CPU and not empty, and a gradient is wanted of one of them.
    """
    if Training is None or _set_aside or dtype not in _LOW_OR_SINGLE or not torch.is_grad_enabled():
        return None
    if not any(t.requires_grad for t in tensors):
        return None
    fit = (
        t.device.type == "cpu" and t.numel() and t.dtype in (dtype, torch.float32) for t in tensors
    )
    return _best() if all(fit) else None


@contextmanager
def without_kernels() -> Iterator[None]:
    """Runs the definitions in all threads, for a comparison with the kernels."""
    _set_aside.append(True)
    try:
        yield
    finally:
        _set_aside.pop()


@cache
def _best() -> Training:
    return Training()


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matrix product would take ``x``: autocast's where that is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
