"""Work on a CUDA device that is recorded once, as a CUDA graph, and then replayed.

A training step of a small model is thousands of kernels of a few microseconds each, more than
Python can start in the time that they take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor

#: Before the recording, so that libraries have their handles and optimisers their states.
WARM_UP = 3

Result = TypeVar("Result")


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
