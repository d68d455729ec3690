"""The forward and the backward pass of a step: its loss, its dropout, and how both are computed.

**Loss.** Cross entropy of a linear head without ever holding all its logits. The logits of a step
(tokens x vocabulary, float32) are the largest tensor of a small model's training. Here they exist
for `LOSS_ROWS` tokens at a time, in the forward pass alone: it computes the gradients too, which is
possible because the loss is the last thing computed, and keeps them instead. After Wijmans et al.
2024 ("Cut Your Losses"), which fuses the same in one kernel.

**Dropout** of what each layer adds to the residual stream (Srivastava et al. 2014), for texts that
are read many times over. What a step drops depends on the seed and the step alone, so that an
interrupted run continues bit for bit.

**Shares.** Two threads that share nothing until the gradients are added are faster than two that
wait for each other at every product. The cut into shares of rows depends on the batch alone and the
gradients are added in order, so the number of threads changes no bit.

**Graphs.** On a CUDA device the work is recorded once, as a CUDA graph, and then replayed: a
training step of a small model is thousands of kernels of a few microseconds each, more than Python
can start in the time that they take.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention.base import Attention
from model.lm import Block, LanguageModel
from model.ops.fused import Training, kernels_for

LOSS_ROWS = 512
#: On a CUDA device, whose memory has room for them.
CUDA_LOSS_ROWS = 16384


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        kernels: Training | None,
    ) -> Tensor:
        x_low, w_low = x.to(dtype), weight.to(dtype)
        dx, dw = torch.empty_like(x), torch.zeros_like(weight)
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        rows = CUDA_LOSS_ROWS if x.is_cuda else LOSS_ROWS
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            logits = x_low[part] @ w_low.t()
            if kernels is None:
                nll, grad = _softmax_gradient(logits, targets[part])
                total += nll
            else:
                total += kernels.cross_entropy(logits, targets[part])
                grad = logits  # overwritten
            dx[part] = grad @ w_low
            dw += (grad.t() @ x_low[part]).float()  # adding two types is slower
        ctx.save_for_backward(dx, dw)
        return (total / len(x)).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        scale = grads[0] / len(dx)
        return dx * scale, dw * scale, None, None, None


def _softmax_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of -log p of ``targets`` [N], and softmax of ``logits`` [N, V] less the targets."""
    dtype, wanted = logits.dtype, targets.unsqueeze(1)
    logits = logits.float()
    logits = logits.sub_(logits.amax(dim=-1, keepdim=True))
    target_logits = logits.gather(1, wanted).squeeze(1)
    p = logits.exp_()
    sums = p.sum(dim=-1, keepdim=True)
    nll = (sums.squeeze(1).log() - target_logits).sum()
    return nll, p.div_(sums).scatter_add_(1, wanted, torch.full_like(sums, -1.0)).to(dtype)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Mean negative log likelihood in nats, a float32 scalar.

    ``x`` [N, D], ``weight`` [vocabulary, D], ``targets`` [N] int64; matrix
    products run in ``dtype``, the softmax in float32, on the CPU in a native kernel.
    """
    kernels = kernels_for(dtype, x, weight)
    loss = _LinearCrossEntropy.apply(x, weight, targets, dtype, kernels)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss)


class ResidualDropout:
    """Drops each channel of the outputs of attention and MLP with probability ``p`` in training.

    Raises `ValueError` for a network whose layers are not `model.lm.Block`.
    """

    def __init__(self, model: nn.Module, p: float, seed: int) -> None:
        self.p, self.seed = p, seed
        self._of_thread = threading.local()
        if not p:
            return
        if not isinstance(model, LanguageModel):
            raise ValueError("dropout is of the model_type 'everstream' alone")
        for block in model.blocks:
            assert isinstance(block, Block)
            for module in (block.attention.out, block.mlp.down):
                assert isinstance(module, nn.Module)
                module.register_forward_hook(self._drop)

    def start(self, step: int, row: int, device: torch.device) -> None:
        """From here on this thread computes the rows of a batch from ``row`` on."""
        if not self.p:
            return
        seed = int(np.random.SeedSequence((self.seed, step, row)).generate_state(1)[0])
        if device.type == "cuda":  # a graph takes its seed from the device's own generator
            torch.cuda.manual_seed(seed)
            return
        self._of_thread.generator = torch.Generator().manual_seed(seed)

    def _drop(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if not module.training:
            return output
        if output.is_cuda:
            return F.dropout(output, self.p)
        kept = torch.empty_like(output).bernoulli_(1 - self.p, generator=self._of_thread.generator)
        return output * kept / (1 - self.p)


#: Rows that a thread computes at a time: fewer cost more additions, more need more memory.
SHARE_ROWS = 8

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
    size = min(SHARE_ROWS, -(-batch_size // 2))
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
