"""Gated linear attention: a decay per key channel that depends on the token.

    a_t = exp(logsigmoid(x_t W_1 W_2 + b) / 16)                            [H, K]
    S_t = diag(a_t) S_{t-1} + k_t v_t^T
    o_t = rms_norm(K^-1/2 q_t^T S_t) * silu(x_t W_g),   y_t = o_t W_o

after Yang et al. 2024 ("Gated Linear Attention Transformers with Hardware-
Efficient Training", section 4.4; alpha there is a here). ``log a`` is bounded
below by `MIN_LOG_DECAY`, a = 0.007, which a logit of -80 reaches.

With ``conv_size`` W > 0, q, k and v first pass a causal depthwise convolution
over the last W tokens and a silu, whose state is constant too.

State per layer: S [H, K, V]; with a convolution also conv [W - 1, H (2 K + V)].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention.base import HeadsAttention, Losses, State
from model.attention.specs import AttentionConfig
from model.ops.recurrence import MIN_LOG_DECAY, recurrence_chunk, recurrence_step

DECAY_TEMPERATURE = 16.0


class GatedAttention(HeadsAttention):
    """See the module's docstring.

    Options: ``conv_size`` (0 for none), ``decay_rank``, ``key_dim`` (0 for ``head_dim``).
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        rank = self.options["decay_rank"]
        self.decay_down = nn.Linear(config.hidden_size, rank, bias=False)
        self.decay_up = nn.Linear(rank, self.num_heads * self.key_width, bias=True)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Decays are spread from fast to slow over the channels."""
        super().reset_parameters(generator)
        with torch.no_grad():
            self.decay_up.bias.copy_(
                torch.linspace(-2.0, 6.0, self.key_width).repeat(self.num_heads)
            )

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        q, k, v, new_state = self._convolved(x, state)
        q = q * self.key_width**-0.5
        num, new_state["S"] = recurrence_chunk(
            q, k, v, state["S"], self._log_decay(x), bounded=True
        )
        return self._merge(num, x), new_state

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        q, k, v, new_state = self._convolved(x, state)
        q = q * self.key_width**-0.5
        num, new_state["S"] = recurrence_step(q, k, v, state["S"], self._log_decay(x))
        return self._merge(num, x), new_state

    def _log_decay(self, x: Tensor) -> Tensor:
        logit = self.decay_up(self.decay_down(x)).float()
        log_decay = (F.logsigmoid(logit) / DECAY_TEMPERATURE).clamp_min(MIN_LOG_DECAY)
        heads: Tensor = log_decay.unflatten(-1, (self.num_heads, -1))
        return heads
