"""Random features of the softmax kernel ``exp(q . k)`` (Choromanski et al. 2020, section 2.3).

With rows w_f of W drawn from N(0, I), for q and k that are already scaled,

    exp(q . k) = E exp(w . q - |q|^2/2) exp(w . k - |k|^2/2)                positive
               = E exp(|q|^2/2) exp(|k|^2/2) cos(w . (q - k))               trigonometric

Orthogonal rows keep each row's distribution, and so the means, and lower the variance.
The factor 1/m of the mean over m rows is left to the caller: with a denominator it cancels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def gaussian_projection(
    num_features: int, dim: int, generator: torch.Generator, orthogonal: bool = True
) -> Tensor:
    """Rows whose distribution is N(0, I), [m, K] float32 on the CPU.

    ``orthogonal`` makes each block of K rows orthogonal (the last may be
    shorter) and leaves the blocks independent of each other. Advances
    ``generator``.
    """
    rows = _gaussian(num_features, dim, generator)
    if orthogonal:
        num_blocks = -(-num_features // dim)
        directions = torch.cat([_rotation(dim, generator) for _ in range(num_blocks)])
        rows = directions[:num_features] * rows.norm(dim=1, keepdim=True)
    return rows.float()


def _rotation(dim: int, generator: torch.Generator) -> Tensor:
    """An orthogonal matrix, uniform over all of them: the signs undo what QR prefers."""
    q, r = torch.linalg.qr(_gaussian(dim, dim, generator))
    return q * r.diagonal().sign()  # type: ignore[no-any-return]


def _gaussian(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def log_positive_features(x: Tensor, projection: Tensor) -> Tensor:
    """``W x - |x|^2/2``: the logarithms of the positive features, [..., m].

    ``x`` is [..., K] for a ``projection`` [m, K], or [..., H, K] for one [H, m, K].
    """
    return project(x, projection) - half_square(x)


def trigonometric_features(x: Tensor, projection: Tensor) -> Tensor:
    """``exp(|x|^2/2) [cos(W x), sin(W x)]``, [..., 2m]; shapes as `log_positive_features`.

    Products of these, and so denominators, can be negative.
    """
    angle = project(x, projection)
    return torch.cat([angle.cos(), angle.sin()], dim=-1) * half_square(x).exp()


def project(x: Tensor, projection: Tensor) -> Tensor:
    """``W x`` in the dtype of ``x``, for weights of any dtype; shapes as above.

    For one token and heads, [B, H, K] or [B, 1, H, K], multiplied and summed, as in
    `model.ops.products`.
    """
    projection = projection.to(x.dtype)
    if projection.dim() == 2:
        return F.linear(x, projection)
    if x.dim() == 3 or x.shape[1] == 1:
        return (x.unsqueeze(-2) * projection).sum(dim=-1)
    return torch.einsum("...hk,hmk->...hm", x, projection)


def log_softmax_of_distance(
    x: Tensor, points: Tensor, beta: float = 1.0, log_prior: Tensor | None = None
) -> Tensor:
    """``log softmax_f(-beta |x - w_f|^2/2 + log pi_f)``, the posterior of a Gaussian mixture.

    ``x`` is [..., H, K], ``points`` w [H, m, K], ``log_prior`` [H, m]; returns
    [..., H, m]. The term |x|^2 cancels.
    """
    closeness = project(x, points) - half_square(points.to(x.dtype)).squeeze(-1)
    total = beta * closeness
    if log_prior is not None:
        total = total + log_prior.to(x.dtype).log_softmax(dim=-1)
    return total.log_softmax(dim=-1)


def half_square(x: Tensor) -> Tensor:
    """``|x|^2/2``, [..., 1]."""
    return 0.5 * x.square().sum(dim=-1, keepdim=True)
