"""RWKV-7's time mix, which more than one family has.

Equations: arXiv 2503.14456, section 3 and appendix; names as in the published weights where they
have one (k_k, k_a, r_k). The output gate and the norm of each head's output are left out where
the config has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.rwkv7.config import TimeMixConfig
from model.architectures.rwkv7.recurrence import Inputs, Recurrence

#: log w = -e^-0.5 sigmoid(...): no channel decays faster than to 0.545 per token.
MAX_LOG_DECAY = math.exp(-0.5)


class LowRank(nn.Module):
    """``f(x A) B + bias``."""

    def __init__(self, width: int, rank: int, bias: bool = True) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=bias)

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        x = self.down(x)
        return self.up(x if f is None else f(x))  # type: ignore[no-any-return]


class TimeMix(nn.Module):
    """Token mixing. ``shift_mix`` has the rows r, w, k, v, a, and g if there is a gate."""

    def __init__(self, config: TimeMixConfig, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = (config.num_attention_heads, config.head_dim)
        self.shift_mix = nn.Parameter(torch.empty(6 if config.gate_rank else 5, width))
        self.k_k = nn.Parameter(torch.empty(width))
        self.k_a = nn.Parameter(torch.empty(width))
        self.r_k = nn.Parameter(torch.empty(self.heads))
        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.decay = LowRank(width, config.decay_rank)
        self.rate = LowRank(width, config.rate_rank)
        if layer > 0:
            self.value_mix = LowRank(width, config.value_rank)
        self.gate = LowRank(width, config.gate_rank, bias=False) if config.gate_rank else None
        heads, eps = config.num_attention_heads, config.group_norm_eps
        self.group_norm = nn.GroupNorm(heads, width, eps) if config.group_norm else None

    def forward(
        self, x: Tensor, before: Tensor, v_first: Tensor | None, s: Tensor, run: Recurrence
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``x`` and the inputs ``before`` it, [..., D]; output, the new S, and layer 0's values."""
        r, w, k, v, a, *rest = (torch.lerp(x, before, mix) for mix in self.shift_mix)
        log_w = -MAX_LOG_DECAY * self.decay(w, torch.tanh).float().sigmoid()
        rate = self.rate(a).float().sigmoid()
        r, k, values = self.receptance(r), self.key(k), self.value(v)
        if v_first is None:
            v_first = values
        else:
            values = torch.lerp(values, v_first, self.value_mix(v).sigmoid())
        r, k, values = r.float(), k.float(), values.float()
        removal = F.normalize(self._per_head(k * self.k_k), dim=-1, eps=1e-12)
        k = k * (1 + (rate - 1) * self.k_a)
        r, log_w, k, values, rate = map(self._per_head, (r, log_w, k, values, rate))
        y, s = run(Inputs(r, log_w, k, values, removal, removal * rate), s)
        if self.group_norm is not None:
            y = F.layer_norm(y, y.shape[-1:], eps=self.group_norm.eps)
            y = y * self._per_head(self.group_norm.weight) + self._per_head(self.group_norm.bias)
        bonus = (r * k * self.r_k).sum(dim=-1, keepdim=True) * values
        y = (y + bonus).flatten(-2).to(x.dtype)
        if self.gate is not None:
            y = y * self.gate(rest[0], torch.sigmoid)
        return self.output(y), s, v_first

    def _per_head(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, self.heads)
        return heads


def shifted(x: Tensor, first: Tensor) -> Tensor:
    """The row before each of ``x`` [B, T, D]; before the first one there is ``first`` [B, D]."""
    return torch.cat([first.to(x.dtype).unsqueeze(1), x[:, :-1]], dim=1)
