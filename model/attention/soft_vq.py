"""Soft Transformer-VQ: each key belongs to every codeword by a Gaussian mixture.

    p(y | k) = softmax_y(-beta |k - c_y|^2/2 + log pi_y)
    o_t = sum_y exp(q_t . c_y) N_y / sum_y exp(q_t . c_y) C_y
    N_y = sum_j p(y | k_j) v_j,   C_y = sum_j p(y | k_j)

With beta to infinity and equal priors every key belongs to its nearest codeword
alone, which is `vq` without its window; with beta = 1, a random codebook and
equal priors it is Performer's simplified map. Codebook c and priors pi are
trained by gradient.

State per layer: N as S [H, C, V], C as z [H, C], both relative to max [H, C].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.attention.exponential import ExponentialAttention
from model.attention.specs import AttentionConfig
from model.ops.exponential import log_softmax_of_distance, project


class SoftVqAttention(ExponentialAttention):
    """See the module's docstring.

    Options: ``codewords`` (C), ``beta``, ``qk_norm``, ``rotary``, ``rope_theta``.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        shape = (config.num_attention_heads, self.options["codewords"], config.head_dim)
        self.codebook = nn.Parameter(torch.zeros(shape))
        self.log_prior = nn.Parameter(torch.zeros(shape[:2]))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Codewords start where keys do: normal, scaled by K^-1/4."""
        super().reset_parameters(generator)
        with torch.no_grad():
            self.codebook.normal_(0.0, self.config.head_dim**-0.25, generator=generator)
            self.log_prior.zero_()

    def log_features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        beta = self.options["beta"]
        log_k = log_softmax_of_distance(k, self.codebook, beta, self.log_prior)
        return project(q, self.codebook), log_k
