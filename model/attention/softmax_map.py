"""Linear attention whose features are a softmax over the features, of q and of k alike.

    o_t = phi(q_t)^T S_t / max(phi(q_t)^T z_t, 1e-6),   phi(x) = softmax(x)

A special case of the general form. Not Efficient Attention, whose keys are
normalised over positions (see `efficient`). State per layer: S [H, K, V], z [H, K].
"""

from __future__ import annotations

from torch import Tensor

from model.attention.linear import LinearAttention


class SoftmaxMapAttention(LinearAttention):
    """See the module's docstring. Options: ``denominator``, ``rotary``, ``rope_theta``."""

    def features(self, x: Tensor) -> Tensor:
        return x.softmax(dim=-1)
