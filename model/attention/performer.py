"""Performer: random positive features of the softmax kernel (FAVOR+).

After Choromanski et al. 2020, "Rethinking Attention with Performers", section 2.3.

    exp(q . k) = E_w exp(w . q - |q|^2/2) exp(w . k - |k|^2/2),   w ~ N(0, I)

estimated over m rows of W, orthogonal in blocks of K rows. The factors of q
alone and 1/m cancel against the denominator. W is drawn once per head and
saved with the weights.

The published code subtracts the maximum over the keys of the *whole sequence*
and adds an epsilon to each feature, so that later tokens change earlier
outputs; here the maximum runs (`model.ops.exponential`) and nothing is added.

Option ``map`` = "simplified": lq = W q, lk = log softmax(-|k - w|^2/2) over the
rows, in which Performer is the soft relative of Transformer-VQ: `soft_vq` with
W as its codebook, beta = 1 and equal priors.

State per layer: S [H, m, V], z [H, m], max [H, m].
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.attention.exponential import ExponentialAttention
from model.attention.spec import AttentionConfig, num_features
from model.ops.random_features import (
    gaussian_projection,
    log_positive_features,
    log_softmax_of_distance,
    project,
)


class RandomFeatureAttention(ExponentialAttention):
    """Exponential features of a fixed random matrix per head, ``projection`` [H, m, K]."""

    projection: Tensor

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        shape = (config.num_attention_heads, num_features(config, self.options), config.head_dim)
        self.register_buffer("projection", torch.zeros(shape))

    def reset_parameters(self, generator: torch.Generator) -> None:
        super().reset_parameters(generator)
        draw_projection(self.projection, generator, self.options["orthogonal"])


class PerformerAttention(RandomFeatureAttention):
    """See the module's docstring.

    Options: ``map``, ``features`` (m; 0 for K), ``orthogonal``, ``rotary``, ``rope_theta``.
    """

    def log_features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        log_q = project(q, self.projection)
        if self.options["map"] == "simplified":
            return log_q, log_softmax_of_distance(k, self.projection)
        return log_q, log_positive_features(k, self.projection)


def draw_projection(projection: Tensor, generator: torch.Generator, orthogonal: bool) -> None:
    """Fills ``projection`` [H, m, K] in place, each head from its own draw."""
    with torch.no_grad():
        for head in projection:
            num_features, dim = head.shape
            head.copy_(gaussian_projection(num_features, dim, generator, orthogonal))
