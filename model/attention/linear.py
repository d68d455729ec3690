"""Linear attention with a positive feature map and one denominator.

    S_t = S_{t-1} + phi(k_t) v_t^T               S: [H, F, V]
    z_t = z_{t-1} + phi(k_t)                     z: [H, F]
    o_t = phi(q_t)^T S_t / phi(q_t)^T z_t

after Katharopoulos et al. 2020 ("Transformers are RNNs", eq. 7-12). Nothing
decays, so S and z are float64. A mechanism is a feature map.

Option ``denominator`` "tokens" divides by t, the number of tokens so far, instead of by the sum
of the weights, and z is not kept.

Option ``rotary``: "before" rotates q and k before the feature map; "after"
rotates the features in the numerator and leaves the denominator as it is,
positive (Su et al. 2021, RoFormer, eq. 19). "After" makes the numerator's weight
of a pair depend on nothing but the two features and their distance, that is,
relative; "before" does so only for a map that keeps rotations (`cosine`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from model.attention.base import HeadsAttention, Losses, State, token_positions
from model.ops.recurrence import (
    normalizer_chunk,
    normalizer_step,
    recurrence_chunk,
    recurrence_step,
)

EPSILON = 1e-6


class LinearAttention(HeadsAttention):
    """See the module's docstring. Subclasses give `features`."""

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """From q or k, [..., H, K] float32, the features, of at least zero, [..., H, F]."""

    def denominator(self, den: Tensor) -> Tensor:
        """Where no feature of the query met one of a key, 0 / 0 must read zero."""
        return den.clamp_min(EPSILON)

    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        positions = token_positions(position, x.shape[1])
        q, k, v, conv = self._features(x, state, positions)
        den, z = self._denominator(q, k, state, positions, normalizer_chunk)
        num, s = recurrence_chunk(*self._rotated(q, k, positions), v, state["S"])
        return self._merge(num / den.unsqueeze(-1), x), {"S": s, **z, **conv}

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        q, k, v, conv = self._features(x, state, position)
        den, z = self._denominator(q, k, state, position, normalizer_step)
        num, s = recurrence_step(*self._rotated(q, k, position), v, state["S"])
        return self._merge(num / den.unsqueeze(-1), x), {"S": s, **z, **conv}

    def _features(
        self, x: Tensor, state: State, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, State]:
        q, k, v, conv = self._project(x, state, positions)
        return self.features(q), self.features(k), v, conv

    def _rotated(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.rotary != "after":
            return q, k
        return self._rotate(q, k, positions)

    def _denominator(
        self,
        q: Tensor,
        k: Tensor,
        state: State,
        positions: Tensor,
        normalizer: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, State]:
        """What the numerator is divided by, [..., H] or [..., 1], and its part of the state."""
        if self.options["denominator"] == "tokens":
            return (positions + 1).unsqueeze(-1).to(q.dtype), {}
        den, z = normalizer(q, k, state["z"])
        return self.denominator(den), {"z": z}


class EluAttention(LinearAttention):
    """Linear Transformer: ``phi(x) = elu(x) + 1`` (Katharopoulos et al. 2020, eq. 7).

        o_t = phi(q_t)^T S_t / (phi(q_t)^T z_t + 1e-6)

    No scaling of q and k, as in the paper. State per layer: S [H, K, V], z [H, K].

    Options: ``denominator``, ``rotary``, ``rope_theta``.
    """

    def features(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1.0

    def denominator(self, den: Tensor) -> Tensor:
        return den + EPSILON


class ReluAttention(LinearAttention):
    """Linear attention with ReLU features.

    After Kasai et al. 2021, "Finetuning Pretrained Transformers into RNNs", eq. 3,
    without its learned matrix.

        o_t = phi(q_t)^T S_t / max(phi(q_t)^T z_t, 1e-6),   phi(x) = max(x, 0)

    A query whose features are all zero, or meet no key's, reads zero. State per
    layer: S [H, K, V], z [H, K].

    Options: ``denominator``, ``rotary``, ``rope_theta``.
    """

    def features(self, x: Tensor) -> Tensor:
        return F.relu(x)


class SoftmaxMapAttention(LinearAttention):
    """Linear attention whose features are a softmax over the features, of q and of k alike.

        o_t = phi(q_t)^T S_t / max(phi(q_t)^T z_t, 1e-6),   phi(x) = softmax(x)

    A special case of the general form. Not Efficient Attention, whose keys are
    normalised over positions (see `efficient`). State per layer: S [H, K, V], z [H, K].

    Options: ``denominator``, ``rotary``, ``rope_theta``.
    """

    def features(self, x: Tensor) -> Tensor:
        return x.softmax(dim=-1)
