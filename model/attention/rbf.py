"""Attention by the Gaussian kernel, estimated with random features.

After Tsai et al. 2019, "Transformer Dissection: An Unified Understanding for
Transformer's Attention via the Lens of Kernel", section 3.2.

    exp(-|q - k|^2/2) = exp(-|q|^2/2) exp(q . k) exp(-|k|^2/2)

The factor of q cancels against the denominator, so this is FAVOR+ (`performer`)
with one more factor exp(-|k|^2/2): lq = W q, lk = W k - |k|^2.

State per layer: S [H, m, V], z [H, m], max [H, m].
"""

from __future__ import annotations

from torch import Tensor

from model.attention.performer import RandomFeatureAttention
from model.ops.random_features import half_square, log_positive_features, project


class RbfAttention(RandomFeatureAttention):
    """See the module's docstring.

    Options: ``rotary``, ``rope_theta``, and those of `RandomFeatureAttention`.
    """

    def log_features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        log_k = log_positive_features(k, self.projection) - half_square(k)
        return project(q, self.projection), log_k
