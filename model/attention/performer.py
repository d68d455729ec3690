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

from typing import ClassVar

import torch
from torch import Tensor

from model.attention.exponential import ExponentialAttention
from model.attention.heads import ROTARY, ROTARY_OPTIONS
from model.config import ModelConfig
from model.ops.random_features import (
    gaussian_projection,
    log_positive_features,
    log_softmax_of_distance,
    project,
)


class RandomFeatureAttention(ExponentialAttention):
    """Exponential features of a fixed random matrix per head, ``projection`` [H, m, K]."""

    projection: Tensor
    options: ClassVar[dict[str, object]] = {
        **ROTARY_OPTIONS,
        "features": 0,
        "orthogonal": True,
    }
    allowed: ClassVar[dict[str, tuple[object, ...]]] = {**ROTARY, "features": (0, 65536)}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        shape = (config.num_attention_heads, self.num_features(config), config.head_dim)
        self.register_buffer("projection", torch.zeros(shape))

    @classmethod
    def num_features(cls, config: ModelConfig) -> int:
        return cls.option(config, "features") or config.head_dim

    def reset_parameters(self, generator: torch.Generator) -> None:
        draw_projection(self.projection, generator, self.option(self.config, "orthogonal"))


class PerformerAttention(RandomFeatureAttention):
    """See the module's docstring.

    Options: ``map``, ``features`` (m; 0 for K), ``orthogonal``, ``rotary``, ``rope_theta``.
    """

    options: ClassVar[dict[str, object]] = {**RandomFeatureAttention.options, "map": "favor"}
    allowed: ClassVar[dict[str, tuple[object, ...]]] = {
        **RandomFeatureAttention.allowed,
        "map": ("favor", "simplified"),
    }

    def log_features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        log_q = project(q, self.projection)
        if self.option(self.config, "map") == "simplified":
            return log_q, log_softmax_of_distance(k, self.projection)
        return log_q, log_positive_features(k, self.projection)


def draw_projection(projection: Tensor, generator: torch.Generator, orthogonal: bool) -> None:
    """Fills ``projection`` [H, m, K] in place, each head from its own draw."""
    with torch.no_grad():
        for head in projection:
            num_features, dim = head.shape
            head.copy_(gaussian_projection(num_features, dim, generator, orthogonal))
