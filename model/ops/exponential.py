"""Attention by exponential features, with a running maximum and no epsilon.

    o_t = sum_{j <= t} w_tj v_j / sum_{j <= t} w_tj,   w_tj = sum_f exp(lq_tf + lk_jf)

for log features lq, lk. Published code subtracts a maximum over the whole
sequence, which is not causal, or none, which overflows. Here each feature
keeps its own running maximum ``m_f = max_{j <= t} lk_jf``, and S and z are
relative to it; when it rises they shrink:

    S_f = sum_j exp(lk_jf - m_f) v_j,   z_f = sum_j exp(lk_jf - m_f) >= 1

so that this is the recurrence with k = exp(lk - m) and the decay
``a_t = exp(m_{t-1} - m_t)``. The largest term of z is one for each feature, so
the denominator is never small. m only chooses the scale and cancels in the
ratio: no gradient flows through it.

Zero state means "no token yet": z is zero there and nowhere else.

The log features may be random ones of the softmax kernel ``exp(q . k)`` (Choromanski et al. 2020,
section 2.3). With rows w_f of W drawn from N(0, I), for q and k that are already scaled,

    exp(q . k) = E exp(w . q - |q|^2/2) exp(w . k - |k|^2/2)                positive
               = E exp(|q|^2/2) exp(|k|^2/2) cos(w . (q - k))               trigonometric

Orthogonal rows keep each row's distribution, and so the means, and lower the variance.
The factor 1/m of the mean over m rows is left to the caller: with a denominator it cancels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from model.ops.recurrence import decayed, recurrence_chunk, recurrence_step

#: Stands for the logarithm of zero where a difference must stay finite.
LOG_ZERO = -1e30


def running_max(
    log_k: Tensor, z: Tensor, maximum: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The running maximum after each token and the log decays that it implies.

    ``log_k`` [B, T, H, F]; ``z``, ``maximum`` [B, H, F]; ``valid`` [B, T] masks
    tokens that do not count. Returns two [B, T, H, F] without gradient.
    """
    log_k = log_k.detach()
    if valid is not None:
        log_k = log_k.masked_fill(~valid[:, :, None, None], LOG_ZERO)
    start = maximum.masked_fill(z <= 0, LOG_ZERO).unsqueeze(1)
    path = torch.cat([start, log_k], dim=1).cummax(dim=1).values
    before, after = path[:, :-1], path[:, 1:]
    return after, (before - after).masked_fill(before <= LOG_ZERO, 0.0)


def exponential_chunk(
    log_q: Tensor,
    log_k: Tensor,
    v: Tensor,
    state: dict[str, Tensor],
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """T tokens: num [B, T, H, V], den and their common log scale [B, T, H], and the new state.

    ``log_q``, ``log_k`` [B, T, H, F]; ``v`` [B, T, H, V]; ``state`` holds S
    [B, H, F, V] and z [B, H, F], float64, and max [B, H, F], float32; ``valid``
    [B, T] masks keys that do not count. The true numerator is ``num exp(scale)``.
    """
    reference, log_decay = running_max(log_k, state["z"], state["max"], valid)
    q, scale = _scaled_query(log_q, reference)
    k = (log_k - reference).clamp_max(0.0).exp()
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    if valid is not None:
        k = k * valid[:, :, None, None]
    both = torch.cat([state["S"], state["z"].unsqueeze(-1)], dim=-1)
    num, both = recurrence_chunk(q, k, v, both, log_decay)
    new_state = {"S": both[..., :-1], "z": both[..., -1], "max": _finite(reference[:, -1])}
    return num[..., :-1], num[..., -1], scale, new_state


def exponential_step(
    log_q: Tensor, log_k: Tensor, v: Tensor, state: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """One token: num [B, H, V], den [B, H] and the new state; `exponential_chunk` without masks."""
    k, log_decay, reference = key_step(log_k, state)
    q, _ = _scaled_query(log_q, reference)
    num, s = recurrence_step(q, k, v, state["S"], log_decay)
    z = decayed(state["z"], log_decay) + k
    den = (q * z.to(q.dtype)).sum(dim=-1)
    return num, den, {"S": s, "z": z, "max": reference}


def key_step(log_k: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """One token's key relative to the new maximum, log decay and that maximum; [B, H, F] each."""
    reference, log_decay = running_max(log_k.unsqueeze(1), state["z"], state["max"])
    reference = reference.squeeze(1)
    return (log_k - reference).clamp_max(0.0).exp(), log_decay.squeeze(1), reference


def _scaled_query(log_q: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """exp(lq + m) relative to its largest feature, and the logarithm of that."""
    total = log_q + reference
    scale = total.detach().amax(dim=-1, keepdim=True)
    return (total - scale).exp(), scale.squeeze(-1)


def _finite(maximum: Tensor) -> Tensor:
    """Zero where no valid token was seen."""
    return maximum.masked_fill(maximum <= LOG_ZERO, 0.0)


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
    `model.ops.layers`.
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
