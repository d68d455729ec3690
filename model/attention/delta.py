"""The gated delta rule: a key's old value is removed before the new one is added.

After Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta
Rule", eq. 10.

    S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
    o_t = rms_norm(q_t^T S_t) * silu(x_t W_g)
    beta_t = sigmoid(x_t W_b),   a_t = exp(-exp(A) softplus(x_t W_a + b_a))   per head

q and k have unit length (q then times K^-1/2), after a short convolution and a
silu as in `gated`. Without option ``decay`` a = 1 (Schlag et al. 2021, "Linear
Transformers Are Secretly Fast Weight Programmers", eq. 24). With option ``negative_eigenvalues``
beta is twice as large, so that a token may turn what its key reads around (Grazzi et al. 2024,
"Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues"). Without option ``gate``
the output is rms_norm(q_t^T S_t). With option ``channel_decay`` a_t is one number per key channel,
which multiplies the rows of S, as in Kimi Delta Attention (Kimi Team 2025, "Kimi Linear: An
Expressive, Efficient Attention Architecture", eq. 1, whose gate is a sigmoid of low rank):

    a_t = exp(-exp(A) softplus(x_t W_1 W_2 + b)),   W_1 [D, K],   log a_t at least `MIN_LOG_DECAY`

Option ``key_dim`` is K, and V where it is 0.

State per layer: S [H, K, V]; with a convolution also conv [W - 1, H (2 K + V)].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention.base import HeadsAttention, Losses, State
from model.attention.specs import AttentionConfig
from model.ops.delta import delta_step
from model.ops.fused import convolved_silu, packed_delta_chunk, unit_heads, unit_length
from model.ops.recurrence import MIN_LOG_DECAY


class DeltaAttention(HeadsAttention):
    """See the module's docstring. ``conv_size`` is 0 for no convolution."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self.beta = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        if self.options["decay"]:
            self.decay_log = nn.Parameter(torch.zeros(self.num_heads))
            if self.options["channel_decay"]:
                keys = self.num_heads * self.key_width
                self.decay_down = nn.Linear(config.hidden_size, self.key_width, bias=False)
                self.decay_up = nn.Linear(self.key_width, keys, bias=True)
            else:
                self.decay = nn.Linear(config.hidden_size, self.num_heads, bias=True)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Heads, or the channels of each, start with decays of about 1e-3 to 1e-1 per token.

        Evenly in the logarithm.
        """
        super().reset_parameters(generator)
        if self.options["decay"]:
            with torch.no_grad():
                self.decay_log.zero_()
                if self.options["channel_decay"]:
                    bias, num_rates = self.decay_up.bias, self.key_width
                else:
                    bias, num_rates = self.decay.bias, self.num_heads
                rates = torch.logspace(-3, -1, num_rates).expm1().log()  # softplus's inverse
                bias.copy_(rates.repeat(len(bias) // num_rates))

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        qkv, unit, new_state = self.qkv(x), self.num_heads * self.key_width, {}
        if self.conv_size:
            qkv, new_state["conv"] = convolved_silu(
                qkv, self.conv_weight, state["conv"], unit, self.key_width
            )
        else:
            qkv = unit_heads(qkv.float(), unit, self.key_width)
        beta, log_decay = self._gates(x)
        num, new_state["S"] = packed_delta_chunk(qkv, beta, log_decay, state["S"])
        return self._merge(num, x), new_state

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        q, k, v, new_state = self._convolved(x, state)
        beta, log_decay = self._gates(x)
        q, k = unit_length(q) * self.key_width**-0.5, unit_length(k)
        num, new_state["S"] = delta_step(q, k, v, beta, log_decay, state["S"])
        return self._merge(num, x), new_state

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The gates beta, [..., H], and log a, [..., H] or [..., H, K].

        By `logsigmoid`, because sigmoid and softplus round differently in a vector loop and
        in the rest after it, where an odd number of heads puts a row now here, now there.
        """
        beta = F.logsigmoid(self.beta(x).float()).exp()
        if self.options["negative_eigenvalues"]:
            beta = 2 * beta
        if not self.options["decay"]:
            return beta, torch.zeros_like(beta)
        rate = self.decay_log.float().exp()
        if not self.options["channel_decay"]:
            return beta, rate * F.logsigmoid(-self.decay(x).float())
        logit = self.decay_up(self.decay_down(x)).float().unflatten(-1, (self.num_heads, -1))
        log_decay = rate.unsqueeze(-1) * F.logsigmoid(-logit)
        return beta, log_decay.clamp_min(MIN_LOG_DECAY)
