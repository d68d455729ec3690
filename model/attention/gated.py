"""Gated linear attention: a decay per key channel that depends on the token.

    a_t = exp(max(logsigmoid(x_t W_1 W_2 + b) / 16, MIN_LOG_DECAY))        [H, K]
    S_t = diag(a_t) S_{t-1} + k_t v_t^T
    o_t = rms_norm(K^-1/2 q_t^T S_t) * silu(x_t W_g),   y_t = o_t W_o

after Yang et al. 2024 ("Gated Linear Attention Transformers with Hardware-
Efficient Training", section 4.4; alpha there is a here). The lower bound on
``log a`` is ours: it keeps the chunk form finite and is reached only where the
gate's logit falls below -40.

With ``conv_size`` W > 0, q, k and v first pass a causal depthwise convolution
over the last W tokens and a silu, whose state is constant too.

State per layer: S [H, K, V]; with a convolution also conv [W - 1, 3 H K].
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention.base import Attention, Losses, State, TensorSpec
from model.config import ConfigError, ModelConfig
from model.ops.convolution import convolution_chunk, convolution_step
from model.ops.recurrence import MIN_LOG_DECAY, recurrence_chunk, recurrence_step

DECAY_TEMPERATURE = 16.0


class GatedAttention(Attention):
    """See the module's docstring. Options: ``conv_size`` (0 for none), ``decay_rank``."""

    options: ClassVar[dict[str, object]] = {"conv_size": 4, "decay_rank": 16}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.heads = (config.num_attention_heads, config.head_dim)
        width = config.num_attention_heads * config.head_dim
        self.conv_size = self.integer_option(config, "conv_size")
        rank = self.integer_option(config, "decay_rank")
        self.qkv = nn.Linear(config.hidden_size, 3 * width, bias=False)
        if self.conv_size:
            self.conv_weight = nn.Parameter(torch.zeros(3 * width, self.conv_size))
        self.decay_down = nn.Linear(config.hidden_size, rank, bias=False)
        self.decay_up = nn.Linear(rank, width, bias=True)
        self.gate = nn.Linear(config.hidden_size, width, bias=False)
        self.norm_weight = nn.Parameter(torch.ones(config.head_dim))
        self.out = nn.Linear(width, config.hidden_size, bias=False)

    @classmethod
    def check_options(cls, config: ModelConfig) -> None:
        super().check_options(config)
        for name, low in (("conv_size", 0), ("decay_rank", 1)):
            value = cls.integer_option(config, name)
            if not low <= value <= 1024 or (name, value) == ("conv_size", 1):
                raise ConfigError(f"attention_options.{name} is out of range: {value}")

    @classmethod
    def state_spec(cls, config: ModelConfig) -> dict[str, TensorSpec]:
        heads, dim = config.num_attention_heads, config.head_dim
        spec = {"S": TensorSpec((heads, dim, dim))}
        if conv_size := cls.integer_option(config, "conv_size"):
            spec["conv"] = TensorSpec((conv_size - 1, 3 * heads * dim))
        return spec

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Convolutions start as the identity, decays spread from fast to slow over the channels."""
        with torch.no_grad():
            if self.conv_size:
                self.conv_weight.zero_()
                self.conv_weight[:, -1] = 1.0
            self.decay_up.bias.copy_(
                torch.linspace(-2.0, 6.0, self.config.head_dim).repeat(self.heads[0])
            )
            self.norm_weight.fill_(1.0)

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        qkv, new_state = self.qkv(x), {}
        if self.conv_size:
            qkv, new_state["conv"] = convolution_chunk(qkv, self.conv_weight, state["conv"])
            qkv = F.silu(qkv)
        q, k, v = self._split(qkv)
        num, new_state["S"] = recurrence_chunk(q, k, v, state["S"], self._log_decay(x))
        return self._output(num, x), new_state

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        qkv, new_state = self.qkv(x), {}
        if self.conv_size:
            qkv, new_state["conv"] = convolution_step(qkv, self.conv_weight, state["conv"])
            qkv = F.silu(qkv)
        q, k, v = self._split(qkv)
        num, new_state["S"] = recurrence_step(q, k, v, state["S"], self._log_decay(x).exp())
        return self._output(num, x), new_state

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.float().unflatten(-1, (3, *self.heads)).unbind(-3)
        return q * self.config.head_dim**-0.5, k, v

    def _log_decay(self, x: Tensor) -> Tensor:
        logit = self.decay_up(self.decay_down(x)).float()
        log_decay = F.logsigmoid(logit) / DECAY_TEMPERATURE
        return log_decay.clamp_min(MIN_LOG_DECAY).unflatten(-1, self.heads)  # type: ignore[no-any-return]

    def _output(self, num: Tensor, x: Tensor) -> Tensor:
        o = F.rms_norm(num, num.shape[-1:], self.norm_weight.float(), self.config.rms_norm_eps)
        gated = o.flatten(-2).to(x.dtype) * F.silu(self.gate(x))
        return self.out(gated)  # type: ignore[no-any-return]
