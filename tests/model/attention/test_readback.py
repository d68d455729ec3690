"""No form of training reads a value back from the device.

On a GPU that would wait for all work before it, and work that waits cannot be captured in a CUDA
graph. The operations are looked at on the CPU, without the kernels of the extension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.ops.fused import without_kernels
from tests.model.attention.test_contract import CASES, CPU, case_id, inputs, make_layer, positions

aten = torch.ops.aten
READ_BACK = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default)
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


class NoReadback(TorchDispatchMode):
    """Fails at an operation that needs a value, or the number of true ones, on the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func not in READ_BACK, func
        if func in INDEXED:
            assert all(t is None or t.dtype == torch.int64 for t in args[1]), "a mask as an index"
        return func(*args, **(kwargs or {}))


class NoHostValues(NoReadback):
    """Fails also at a `torch.where` with a number, which is copied to the device and waited for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.where.self:  # two numbers are of scaled_dot_product_attention on a CPU
            assert any(t.dim() for t in args[1:]) == all(t.dim() for t in args[1:]), args
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_training_reads_no_value_back(case: tuple[str, dict[str, object]]) -> None:
    layer, x, losses = make_layer(*case).train(), inputs(70).requires_grad_(), list[Tensor]()
    with without_kernels():
        with NoHostValues():
            y = layer.parallel(x, losses)
            if layer.spec.constant_state:
                y, _ = layer.chunk(y, layer.empty_state(2, CPU), positions(0), losses)
        with NoReadback():
            torch.stack([y.sum(), *losses]).sum().backward()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: (x > 0).nonzero(),
        lambda x: torch.where(x > 0, x, 0.0),
    ],
)
def test_what_reads_back_is_found(function: Callable[[Tensor], object]) -> None:
    with pytest.raises(AssertionError), NoHostValues():
        function(inputs(3))
