"""Qwen3.5 as published (transformers' ``qwen3_5``), text alone, dense.

The gated delta net (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464), with h the normed
input, an l2 norm of each q and k, and q also divided by sqrt(K):

    q, k, v = silu(conv(W_qkv h)),   beta = sigmoid(W_b h)
    log a = -exp(A_log) softplus(W_a h + dt_bias)
    S_t = a_t S_{t-1} + k_t (beta_t (v_t - a_t S_{t-1}^T k_t))^T,   o_t = S_t^T q_t
    y = W_out (rms_norm(o) * silu(W_z h))

The multi-token head (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section
2.2) predicts token t + 2 from what the final norm gives for token t, h_t, and token t + 1:

    x_t = W_join [rms_norm(E[token_{t + 1}]), rms_norm(h_t)]
    h'_t = rms_norm(block(x)_t),   logits = W_head h'_t

and the token after that from h'_t, in the place of h_{t + 1}, and the token that it predicted.

The rule itself is `model.ops.delta`, attention `model.architectures.decoder`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.decoder import BoundedAttention, Decoder, DecoderBlock, Mixer
from model.architectures.network import ModelState, State
from model.families.qwen35.config import Qwen35Config, Qwen35MtpConfig
from model.ops.delta import delta_chunk, delta_step
from model.ops.fused import RMSNorm, convolved_silu, gated_rms_norm

#: What a head's rate of decay starts from in training, evenly drawn; as published.
RATES = (0.01, 16.0)


class Qwen35(Decoder):
    """See `model.architectures.network.Network`."""

    def __init__(self, config: Qwen35Config) -> None:
        mixers = [
            BoundedAttention.of(config, rotary_dim=config.rotary_dim)
            if is_attention
            else GatedDeltaNet(config)
            for is_attention in config.is_attention
        ]
        super().__init__(config, mixers, config.norm_eps, config.tied)


class Qwen35Mtp(nn.Module):
    """A multi-token head, see the module: the reference of the native kernel, and for training."""

    def __init__(self, config: Qwen35MtpConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.norm_eps
        attention = BoundedAttention.of(config, rotary_dim=config.rotary_dim)
        self.config = config
        self.embedding_norm, self.hidden_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.join = nn.Linear(2 * width, width, bias=False)
        self.blocks = nn.ModuleList([DecoderBlock(width, config.intermediate_size, eps, attention)])
        self.norm = RMSNorm(width, eps)

    def forward(
        self, embedded: Tensor, hidden: Tensor, state: ModelState, position: Tensor
    ) -> tuple[Tensor, ModelState]:
        """Embeddings [B, T, D] and the hidden states of the tokens before them; h' and the state.

        ``position`` [B] counts what the state has seen.
        """
        both = self.embedding_norm(embedded), self.hidden_norm(hidden)
        x, (layer,) = self.join(torch.cat(both, dim=-1)), state
        x, layer = self.blocks[0](x, layer, position)
        return self.norm(x), (layer,)


class GatedDeltaNet(Mixer):
    """See the module. State "conv" [B, W - 1, C] and "S" [B, Hv, K, V], float32."""

    def __init__(self, config: Qwen35Config) -> None:
        super().__init__()
        width, heads, channels = config.hidden_size, config.num_value_heads, config.conv_channels
        self.num_key_heads, self.key_head_dim = config.num_key_heads, config.key_head_dim
        self.num_value_heads, self.eps = heads, config.norm_eps
        self.qkv = nn.Linear(width, channels, bias=False)
        self.z = nn.Linear(width, config.value_channels, bias=False)
        self.b = nn.Linear(width, heads, bias=False)
        self.a = nn.Linear(width, heads, bias=False)
        self.conv = nn.Parameter(torch.empty(channels, config.conv_size))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = nn.RMSNorm(config.value_head_dim)
        self.out = nn.Linear(config.value_channels, width, bias=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """As published. The convolution as torch's own."""
        bound = self.conv.shape[1] ** -0.5
        with torch.no_grad():
            self.conv.uniform_(-bound, bound, generator=generator)
            self.A_log.uniform_(*RATES, generator=generator).log_()
            self.dt_bias.fill_(1.0)

    def forward(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        """See `Mixer`."""
        rows = self.num_key_heads * self.key_head_dim
        qkv, conv = convolved_silu(self.qkv(x), self.conv, state["conv"], rows, self.key_head_dim)
        q, k, v = qkv.float().split([rows, rows, qkv.shape[-1] - 2 * rows], dim=-1)
        q, k = (self._for_values(keys) for keys in (q, k))
        v = v.unflatten(-1, (self.num_value_heads, -1))
        beta = F.logsigmoid(self.b(x).float()).exp()
        # softplus, which rounds differently at the end of a vector loop
        rate = -F.logsigmoid(-(self.a(x).float() + self.dt_bias.float()))
        log_decay = -self.A_log.float().exp() * rate
        if x.shape[1] == 1:
            q, k, v, beta, log_decay = (t[:, 0] for t in (q, k, v, beta, log_decay))
            o, sums = delta_step(q, k, v, beta, log_decay, state["S"])
            o = o.unsqueeze(1)
        else:
            o, sums = delta_chunk(q, k, v, beta, log_decay, state["S"])
        z = self.z(x).unflatten(-1, (self.num_value_heads, -1))
        y = gated_rms_norm(o, self.norm.weight, z, self.eps)
        return self.out(y.flatten(-2)), {"conv": conv, "S": sums}

    def _for_values(self, keys: Tensor) -> Tensor:
        """[B, T, Hk K] to [B, T, Hv, K]: the key head of each value head."""
        heads: Tensor = keys.unflatten(-1, (self.num_key_heads, -1))
        return heads.repeat_interleave(self.num_value_heads // self.num_key_heads, dim=2)
