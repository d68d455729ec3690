"""How the work of a step is computed: in shares on the threads of a CPU, as one graph on CUDA.

Two threads that share nothing until the gradients are added are faster than two
that wait for each other at every product. The cut into shares of rows depends on the batch alone
and the gradients are added in order, so the number of threads changes no bit.

On a CUDA device the work is recorded once, as a CUDA graph, and then replayed: a training step of a
small model is thousands of kernels of a few microseconds each, more than Python can start in the
time that they take.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from model.attention.base import Attention

#: Rows that a thread computes at a time: fewer cost more additions, more need more memory.
ROWS = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


class Shares:
    """The shares of a batch and the threads that compute them."""

    def __init__(
        self, model: nn.Module, batch_size: int, device: torch.device, threads: int | None
    ) -> None:
        self.rows = _cut(batch_size) if _divisible(model, device) else [slice(0, batch_size)]
        workers = min(threads or os.cpu_count() or 1, len(self.rows))
        self._pool = ThreadPoolExecutor(workers, initializer=_use_one_thread)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """The results in the order of the items."""
        return list(self._pool.map(function, items))

    def close(self) -> None:
        self._pool.shutdown()


def add_gradients(parameters: list[nn.Parameter], shares: list[list[Tensor]]) -> None:
    """Sets each parameter's gradient to the sum over the shares, added in order."""
    first, *others = shares
    for other in others:
        torch._foreach_add_(first, other)
    for parameter, gradient in zip(parameters, first, strict=True):
        parameter.grad = gradient


def _cut(batch_size: int) -> list[slice]:
    """At least two shares, so that two threads have work."""
    size = min(ROWS, -(-batch_size // 2))
    return [slice(start, start + size) for start in range(0, batch_size, size)]


def _divisible(model: nn.Module, device: torch.device) -> bool:
    learns = any(isinstance(m, Attention) and m.learns_in_forward for m in model.modules())
    return device.type == "cpu" and not learns


def _use_one_thread() -> None:
    torch.set_num_threads(1)


#: Before the recording, so that libraries have their handles and optimisers their states.
WARM_UP = 3


class Captured(Generic[Result]):
    """``work`` as a graph; a call replays it and returns the tensors of its result.

    ``work`` must read and write the same tensors each time. ``changed`` gives all that it
    changes, and is asked before the warm-up and after it: what is there before keeps its value,
    what is new (the state of an optimiser) becomes zero.
    """

    def __init__(self, work: Callable[[], Result], changed: Callable[[], Iterable[Tensor]]) -> None:
        before = {id(tensor): tensor.detach().clone() for tensor in changed()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = work()
        with torch.no_grad():
            for tensor in changed():
                if id(tensor) in before:
                    tensor.copy_(before[id(tensor)])
                else:
                    tensor.zero_()

    def __call__(self) -> Result:
        self._graph.replay()
        return self._result
