"""Passes of a training step that the native extension does in one go, with their gradients.

Between the matrix products of a step there are element-wise operations, each of which
torch takes through memory on its own, forward and backward. Here each group of them has
a readable definition in torch and a kernel in ``model/ops/cpu/src/training/training.cpp``. The
kernel is used where a gradient is wanted, the tensors are on the CPU and the extension
is built (`kernels_for`); inference always runs the definition.

Activations go in and come out in the dtype of the products around them (bfloat16 under
autocast); inside a kernel everything is float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.ops.delta import BLOCK, delta_chunk
from model.ops.layers import convolution_chunk

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


EPSILON = 1e-6


def convolved_silu(
    x: Tensor, weight: Tensor, state: Tensor, unit: int = 0, head: int = 1
) -> tuple[Tensor, Tensor]:
    """The short convolution in front of the heads and its silu, and the convolution's new state.

        y = silu(convolution(x)),   q = K^-1/2 y_q / |y_q|,   k = y_k / |y_k|   per head

    with |y| = sqrt(sum y^2 + `EPSILON`).

    ``x`` [B, T, D], ``weight`` [D, W], ``state`` [B, W - 1, D] float32. The first ``unit``
    channels are the queries and as many after them the keys of heads of ``head`` channels,
    which get unit length. Returns [B, T, D] in the dtype of ``x``.
    """
    kernels = kernels_for(x.dtype, x, weight) if state.dtype == torch.float32 else None
    if kernels is None:
        y, state = convolution_chunk(x, weight, state)
        y = F.silu(y)
        return (unit_heads(_at_least_float32(y), unit, head) if unit else y), state
    y = Convolution.apply(kernels, x, weight, state, unit, head)  # type: ignore[no-untyped-call]
    return cast(Tensor, y), _last_inputs(x, state)


def unit_length(x: Tensor) -> Tensor:
    """``x`` [..., K] divided by its length."""
    return x * (x.square().sum(dim=-1, keepdim=True) + EPSILON).rsqrt()


def unit_heads(y: Tensor, unit: int, head: int) -> Tensor:
    """The first ``unit`` channels of ``y`` [..., D], and as many after them, as q and k above."""
    q, k, v = y.split([unit, unit, y.shape[-1] - 2 * unit], dim=-1)
    q, k = (unit_length(t.unflatten(-1, (-1, head))).flatten(-2) for t in (q, k))
    return torch.cat([q * head**-0.5, k, v], dim=-1)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _last_inputs(x: Tensor, state: Tensor) -> Tensor:
    """The last W - 1 of the inputs, the state's before those of ``x``, in float32."""
    kept = state.shape[1]
    if x.shape[1] < kept:
        return torch.cat([state[:, x.shape[1] :], x.float()], dim=1)
    return x[:, x.shape[1] - kept :].float()


class Convolution(torch.autograd.Function):
    """`convolved_silu` with the kernels ``kernels``, without the new state."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Training, x: Tensor, weight: Tensor, state: Tensor, unit: int, head: int
    ) -> Tensor:
        x, weight, state = (t.detach().contiguous() for t in (x, weight, state))
        ctx.kernels, ctx.heads = kernels, (unit, head)
        ctx.save_for_backward(x, weight, state)
        out = torch.empty_like(x)
        kernels.convolution(x, weight, state, unit, head, head**-0.5, EPSILON, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, state = ctx.saved_tensors
        grad_x, grad_weight, grad_state = (torch.empty_like(t) for t in (x, weight, state))
        unit, head = ctx.heads
        ctx.kernels.convolution_backward(
            *(x, weight, state, unit, head, head**-0.5, EPSILON),
            *(grads[0].contiguous(), grad_x, grad_weight, grad_state),
        )
        return None, grad_x, grad_weight, grad_state, None, None


def packed_delta_chunk(
    qkv: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`model.ops.delta.delta_chunk` for ``qkv`` [B, T, H (2 K + V)]: q, then k, then v, by head.

    ``beta``, ``log_decay`` [B, T, H] and ``state`` [B, H, K, V] are float32. Returns num
    [B, T, H, V] and the new S in float32; with the kernel, which goes through a head's blocks one
    after the other with all of a block in the nearest cache, num has the dtype of ``qkv``. There is
    none for a decay per channel, [B, T, H, K].
    """
    per_head = log_decay.dim() == beta.dim()
    kernels = kernels_for(qkv.dtype, qkv, beta, log_decay, state) if per_head else None
    if kernels is None:
        _, heads, key, value = state.shape
        q, k, v = qkv.to(state.dtype).split([heads * key, heads * key, heads * value], dim=-1)
        q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
        return delta_chunk(q, k, v, beta, log_decay, state)
    num, new_state = Delta.apply(kernels, qkv, beta, log_decay, state)  # type: ignore[no-untyped-call]
    return num, new_state


class Delta(torch.autograd.Function):
    """`packed_delta_chunk` with the kernels ``kernels``.

    For the gradient it keeps u and the state before each block, and computes the rest again.
    """

    @staticmethod
    def forward(
        ctx: Any, kernels: Training, qkv: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        qkv, beta, log_decay, state = inputs = [
            t.detach().contiguous() for t in (qkv, beta, log_decay, state)
        ]
        batch, heads, key, value = state.shape
        num_tokens = qkv.shape[1]
        num = qkv.new_empty(batch, num_tokens, heads, value)
        u = qkv.new_empty(batch, heads, num_tokens, value)
        starts = state.new_empty(batch, heads, -(-num_tokens // BLOCK), key, value)
        new_state = torch.empty_like(state)
        kernels.delta(qkv, beta, log_decay, state, num, u, starts, new_state)
        ctx.kernels = kernels
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, u, starts)
        return num, new_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, u, starts = ctx.saved_tensors
        grad_num, grad_state = grads
        if grad_num is None:
            batch, heads, num_tokens, value = u.shape
            grad_num = u.new_zeros(batch, num_tokens, heads, value)
        if grad_state is not None:
            grad_state = grad_state.contiguous()
        results = [torch.empty_like(t) for t in inputs]
        ctx.kernels.delta_backward(*inputs, u, starts, grad_num.contiguous(), grad_state, *results)
        return None, *results


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, epsilon: float) -> Tensor:
    """The norm of a head's output with its gate: ``rms_norm(x) * weight * silu(gate)``.

    ``x``, ``gate`` [..., V] and ``weight`` [V] to [..., V] in the dtype of ``gate``.
    """
    kernels = kernels_for(gate.dtype, x, weight, gate)
    if kernels is None:
        normed = F.rms_norm(x, x.shape[-1:], eps=epsilon) * weight.float()
        return normed.to(gate.dtype) * F.silu(gate)
    return cast(Tensor, GatedNorm.apply(kernels, x.to(gate.dtype), weight, gate, epsilon))  # type: ignore[no-untyped-call]


class GatedNorm(torch.autograd.Function):
    """`gated_rms_norm` with the kernels ``kernels``."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Training, x: Tensor, weight: Tensor, gate: Tensor, epsilon: float
    ) -> Tensor:
        x, weight, gate = (t.detach().contiguous() for t in (x, weight, gate))
        ctx.kernels, ctx.epsilon = kernels, epsilon
        ctx.save_for_backward(x, weight, gate)
        out = torch.empty_like(gate)
        kernels.gated_norm(x, weight, gate, epsilon, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate = ctx.saved_tensors
        grad_x, grad_weight, grad_gate = (torch.empty_like(t) for t in (x, weight, gate))
        ctx.kernels.gated_norm_backward(
            x, weight, gate, ctx.epsilon, grads[0].contiguous(), grad_x, grad_gate, grad_weight
        )
        return None, grad_x, grad_weight, grad_gate, None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4).

        n = x / sqrt(mean(x^2) + epsilon) * weight

    ``x`` [..., D] is the residual stream, which stays in float32, ``weight`` [D]. Returns n
    [..., D], with the kernel in the products' dtype.
    """
    dtype = product_dtype(x)
    kernels = kernels_for(dtype, x, weight) if x.dtype == torch.float32 else None
    if kernels is None:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    return cast(Tensor, Norm.apply(kernels, x, weight, epsilon, dtype))  # type: ignore[no-untyped-call]


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """``x`` and ``y``, the output of a product, [..., D] to ``x + y`` and its norm, both [..., D].

    y and the norm have the dtype of products.
    """
    fit = x.shape == y.shape and x.dtype == torch.float32 and y.dtype == product_dtype(x)
    kernels = kernels_for(y.dtype, x, y, weight) if fit else None
    if kernels is None:
        total = x + y
        return total, rms_norm(total, weight, epsilon)
    total, normed = AddNorm.apply(kernels, x, y, weight, epsilon)  # type: ignore[no-untyped-call]
    return total, normed


class RMSNorm(nn.RMSNorm):
    """torch's, by way of `rms_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)  # type: ignore[arg-type]


class Norm(torch.autograd.Function):
    """`rms_norm` with the kernels ``kernels``; the result has ``dtype``."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Training, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype
    ) -> Tensor:
        x, weight = x.detach().contiguous(), weight.detach().contiguous()
        ctx.kernels, ctx.epsilon = kernels, epsilon
        ctx.save_for_backward(x, weight)
        out = torch.empty_like(x, dtype=dtype)
        kernels.norm(x, None, weight, epsilon, None, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        ctx.kernels.norm_backward(
            x, weight, ctx.epsilon, grads[0].contiguous(), None, grad_x, None, grad_weight
        )
        return None, grad_x, grad_weight, None, None


class AddNorm(torch.autograd.Function):
    """`add_rms_norm` with the kernels ``kernels``."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Training, x: Tensor, y: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        x, y, weight = (t.detach().contiguous() for t in (x, y, weight))
        total, normed = torch.empty_like(x), torch.empty_like(y)
        kernels.norm(x, y, weight, epsilon, total, normed)
        ctx.kernels, ctx.epsilon = kernels, epsilon
        ctx.save_for_backward(total, weight)
        ctx.dtype = y.dtype
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        grad_total, grad_normed = (grad.contiguous() for grad in grads)
        grad_x, grad_y = torch.empty_like(total), torch.empty_like(total, dtype=ctx.dtype)
        grad_weight = torch.empty_like(weight)
        ctx.kernels.norm_backward(
            total, weight, ctx.epsilon, grad_normed, grad_total, grad_x, grad_y, grad_weight
        )
        return None, grad_x, grad_y, grad_weight, None


def swiglu(up: Tensor) -> Tensor:
    """The activation of SwiGLU: ``silu(gate) * value`` for both halves of one product.

    ``up`` [..., 2 I], gate and value, to [..., I] in its dtype.
    """
    kernels = kernels_for(up.dtype, up)
    if kernels is None:
        gate, value = up.chunk(2, dim=-1)
        return F.silu(gate) * value
    return cast(Tensor, Swiglu.apply(kernels, up))  # type: ignore[no-untyped-call]


class Swiglu(torch.autograd.Function):
    """`swiglu` with the kernels ``kernels``."""

    @staticmethod
    def forward(ctx: Any, kernels: Training, up: Tensor) -> Tensor:
        up = up.detach().contiguous()
        ctx.kernels = kernels
        ctx.save_for_backward(up)
        out = up.new_empty(*up.shape[:-1], up.shape[-1] // 2)
        kernels.swiglu(up, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (up,) = ctx.saved_tensors
        grad_up = torch.empty_like(up)
        ctx.kernels.swiglu_backward(up, grads[0].contiguous(), grad_up)
        return None, grad_up
