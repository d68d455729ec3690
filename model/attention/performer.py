"""Performer: random positive features of the softmax kernel (FAVOR+).

After Choromanski et al. 2020, "Rethinking Attention with Performers", section 2.3.

    exp(q . k) = E_w exp(w . q - |q|^2/2) exp(w . k - |k|^2/2),   w ~ N(0, I)

estimated over m rows of W, orthogonal in blocks of K rows. The factors of q
alone and 1/m cancel against the denominator. W is drawn once per head and
saved with the weights, or, with option ``projection`` "trained", only starts there.

The published code subtracts the maximum over the keys of the *whole sequence*
and adds an epsilon to each feature, so that later tokens change earlier
outputs; here the maximum runs (`model.ops.exponential`) and nothing is added.

Option ``map`` = "simplified": lq = W q, lk = log softmax(-|k - w|^2/2) over the
rows, in which Performer is the soft relative of Transformer-VQ: `soft_vq` with
W as its codebook, beta = 1 and equal priors.

``map`` = "hyperbolic": both signs of each row, lq = [W q, -W q] and lk = [W k, -W k] - |k|^2/2,
which lowers the variance (lemma 1 there, the second estimator); m / 2 rows give m features.

``map`` = "relu": features max(W x, 0) + 1e-3 of another kernel than softmax's ("generalized
attention", section 2.2 and appendix B there), as their logarithms.

State per layer: S [H, m, V], z [H, m], max [H, m].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention.exponential import ExponentialAttention
from model.attention.specs import AttentionConfig
from model.ops.exponential import (
    gaussian_projection,
    half_square,
    log_positive_features,
    log_softmax_of_distance,
    project,
)

#: The published one of generalized attention (``kernel_epsilon``).
RELU_EPSILON = 1e-3


class RandomFeatureAttention(ExponentialAttention):
    """Exponential features of a random matrix per head, ``projection`` [H, rows, K].

    Options: ``features`` (m; 0 for K), ``orthogonal``, ``projection``.
    """

    projection: Tensor

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        projection = torch.zeros(self.spec.weight_shapes(config)["projection"])
        if self.options["projection"] == "trained":
            self.projection = nn.Parameter(projection)
        else:
            self.register_buffer("projection", projection)

    def reset_parameters(self, generator: torch.Generator) -> None:
        super().reset_parameters(generator)
        draw_projection(self.projection, generator, self.options["orthogonal"])


class PerformerAttention(RandomFeatureAttention):
    """See the module's docstring.

    Options: ``map``, ``rotary``, ``rope_theta``, and those of `RandomFeatureAttention`.
    """

    def log_features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        log_q = project(q, self.projection)
        if self.options["map"] == "hyperbolic":
            log_k = project(k, self.projection)
            return both_signs(log_q), both_signs(log_k) - half_square(k)
        if self.options["map"] == "relu":
            return log_relu(log_q), log_relu(project(k, self.projection))
        if self.options["map"] == "simplified":
            return log_q, log_softmax_of_distance(k, self.projection)
        return log_q, log_positive_features(k, self.projection)


def both_signs(x: Tensor) -> Tensor:
    """[..., R] to [x, -x], [..., 2 R]."""
    return torch.cat([x, -x], dim=-1)


def log_relu(x: Tensor) -> Tensor:
    """``log(max(x, 0) + 1e-3)``."""
    return (F.relu(x) + RELU_EPSILON).log()


def draw_projection(projection: Tensor, generator: torch.Generator, orthogonal: bool) -> None:
    """Fills ``projection`` [H, m, K] in place, each head from its own draw."""
    with torch.no_grad():
        for head in projection:
            num_features, dim = head.shape
            head.copy_(gaussian_projection(num_features, dim, generator, orthogonal))


class RbfAttention(RandomFeatureAttention):
    """Attention by the Gaussian kernel, estimated with random features.

    After Tsai et al. 2019, "Transformer Dissection: An Unified Understanding for
    Transformer's Attention via the Lens of Kernel", section 3.2.

        exp(-|q - k|^2/2) = exp(-|q|^2/2) exp(q . k) exp(-|k|^2/2)

    The factor of q cancels against the denominator, so this is FAVOR+ (`performer`)
    with one more factor exp(-|k|^2/2): lq = W q, lk = W k - |k|^2.

    State per layer: S [H, m, V], z [H, m], max [H, m].

    Options: ``rotary``, ``rope_theta``, and those of `RandomFeatureAttention`.
    """

    def log_features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        log_k = log_positive_features(k, self.projection) - half_square(k)
        return project(q, self.projection), log_k
