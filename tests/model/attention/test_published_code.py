"""Where published code computes something else than it says or than one wants, and ours does not.

Packages are run; what is not packaged is stated again from its source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.model.attention.packages import (
    dijiang_features,
    linear_attention_transformer,
    log_retention_decay,
    normed_and_gated,
    performer_pytorch,
    project,
)
from tests.model.attention.test_contract import assert_close, inputs, make_layer, run


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


# performer-pytorch


def test_performer_pytorch_is_not_causal() -> None:
    """A later key sets the maximum that all keys are divided by, and then an epsilon is added.

    After a large key the features of all keys before it are the epsilon: what they wrote is
    forgotten, also by queries that came before the large key. `FastAttention` does so although
    it is asked to be causal.
    """
    performer = performer_pytorch()
    attention = performer.FastAttention(8, nb_features=16, causal=True)
    generator = torch.Generator().manual_seed(0)
    attention.projection_matrix.normal_(generator=generator)
    q, k, v = torch.randn(3, 1, 1, 40, 8, generator=generator)
    changed = k.clone()
    changed[..., 30, :] = 3 * attention.projection_matrix[0]
    before, after = (attention(q, keys, v)[..., :30, :] for keys in (k, changed))
    assert (before - after).abs().max() > 0.1 * before.abs().max()

    w = attention.projection_matrix
    features = [
        performer.softmax_kernel(keys, projection_matrix=w, is_query=False)[..., :30, :]
        for keys in (k, changed)
    ]
    assert not torch.allclose(*features)


def test_random_features_of_performer_pytorch_are_not_spread_evenly() -> None:
    """It takes Q of a QR decomposition as it comes, whose first entry is never positive.

    So the features' average is not the kernel, however many there are. Ours is: for q + k the
    first unit vector, exp(w.(q + k) - 1/2) has mean one.
    """
    torch.manual_seed(0)
    theirs = performer_pytorch().gaussian_orthogonal_random_matrix(4096, 8)
    ours = make_layer("performer", {"features": 4096}).get_buffer("projection")[0]
    deviation = math.sqrt((math.e - 1) / 4096)
    assert abs((ours[:, 0] - 0.5).exp().mean() - 1) < 4 * deviation
    assert (theirs[:, 0] - 0.5).exp().mean() < 1 - 4 * deviation


# linear-attention-transformer


def test_causal_form_of_linear_attention_transformer_is_another_mechanism() -> None:
    """One denominator over all features: the general form with phi_k = exp, not `efficient`.

    With keys that are logarithms of a softmax it is `softmax_map`.
    """
    package = linear_attention_transformer()
    x = inputs(64)
    for name, feature_map in (("softmax_map", torch.log_softmax), ("efficient", keep)):
        layer = make_layer(name, {})
        q, k, v = (t.transpose(1, 2) for t in project(layer, x))
        o = package.causal_linear_attn(q, feature_map(k, -1), v, bucket_size=1, eps=0.0)
        wanted, y = layer.out(o.transpose(1, 2).flatten(2)).double(), layer.parallel(x)
        if name == "softmax_map":
            assert_close(y, wanted)
        else:
            assert_close(y[:, :1], wanted[:, :1])  # one value has the same mean whatever its weight
            assert (y - wanted).abs().max() > 0.1 * wanted.abs().max()


def test_bare_exponential_of_linear_attention_transformer_overflows() -> None:
    package = linear_attention_transformer()
    layer, x = make_layer("efficient", {}), 60 * inputs(64)
    q, k, v = (t.transpose(1, 2) for t in project(layer, x))
    assert not package.causal_linear_attn(q, k, v, bucket_size=1).isfinite().all()
    assert layer.parallel(x).isfinite().all()


def test_buckets_of_linear_attention_transformer_are_blind() -> None:
    """By default a token reads only the buckets of 64 before its own, the first one nothing."""
    package = linear_attention_transformer()
    q, k, v = torch.randn(3, 1, 1, 128, 8, generator=torch.Generator().manual_seed(0))
    assert not package.causal_linear_attn(q, k, v)[..., :64, :].any()


# cosFormer, from its published formula


def test_cosformer_equals_the_published_formula_within_the_horizon() -> None:
    layer, x = make_layer("cosformer", {"horizon": 256}), inputs(65)
    o = published_cosformer(*project(layer, x), horizon=256)
    assert_close(layer.parallel(x), layer.out(o.flatten(2)).double())


def test_published_cosformer_changes_the_past_as_the_text_grows() -> None:
    """Its horizon is the length of the text so far; ours is fixed."""
    layer, x = make_layer("cosformer", {}), inputs(65)
    q, k, v = project(layer, x)
    whole = published_cosformer(q, k, v, horizon=65)[:, :21]
    part = published_cosformer(q[:, :21], k[:, :21], v[:, :21], horizon=21)
    assert (whole - part).abs().max() > 0.01 * part.abs().max()
    assert_close(layer.parallel(x)[:, :21], layer.parallel(x[:, :21]).double())


def test_published_cosformer_weighs_negatively_beyond_its_horizon() -> None:
    """Ours drops such keys: its output stays a mean of values."""
    layer, x = make_layer("cosformer", {"horizon": 32}), inputs(65).abs()
    layer.get_parameter("qkv.weight").abs_()  # every query has features
    layer.get_parameter("qkv.weight")[32:] = 0.0
    layer.get_parameter("qkv.weight")[32:, 0] = 1.0
    x[..., 0] = 1.0  # every value is one
    wanted = layer.out(torch.ones(16))
    q, k, _ = project(layer, x)
    assert published_weights(q, k, horizon=32).min() < 0
    assert_close(layer.parallel(x), wanted.expand(2, 65, 24).double())


def published_weights(q: Tensor, k: Tensor, horizon: int) -> Tensor:
    where = torch.arange(q.shape[1])
    turn = torch.cos(math.pi / 2 * (where.unsqueeze(1) - where) / horizon)
    return (torch.einsum("bihk,bjhk->bhij", q.relu(), k.relu()) * turn).tril()


def published_cosformer(q: Tensor, k: Tensor, v: Tensor, horizon: int) -> Tensor:
    """Eq. 10 of Qin et al. 2022, causal; M there is ``horizon``."""
    weights = published_weights(q, k, horizon)
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-6)
    return torch.einsum("bhij,bjhv->bihv", weights, v)


# DiJiang, from its published formula


def test_dijiang_equals_the_published_formula() -> None:
    layer, x = make_layer("dijiang", {}), inputs(65)
    *phi, v = dijiang_features(layer, x)
    num = published_dijiang(*phi, v)
    num = num - num.mean(-1, keepdim=True)
    assert_close(layer.parallel(x), normed_and_gated(layer, num, x).double())


def test_published_dijiang_decodes_from_the_first_token_alone() -> None:
    """With a cache the mask and the query's power of gamma are those of position 0."""
    layer, x = make_layer("dijiang", {}), inputs(65)
    phi_q, phi_k, v = dijiang_features(layer, x)
    decoded = published_dijiang(phi_q[:, -1:], phi_k, v)
    only_first = published_dijiang(phi_q[:, -1:], phi_k[:, :1], v[:, :1])
    assert_close(decoded, only_first.double(), 1e-6)
    y = run(layer, x, [64, 1])[0]
    x[:, 10] += 1.0
    assert not torch.equal(run(layer, x, [64, 1])[0][:, -1], y[:, -1])


def test_published_dijiang_overflows() -> None:
    """It divides keys by gamma^j, which float32 holds for 2,800 tokens of the first head."""
    layer, x = make_layer("dijiang", {}), inputs(2900)
    phi_q, phi_k, v = dijiang_features(layer, x)
    last = published_dijiang(phi_q[:, -1:], phi_k, v, first=2899)
    assert not last.isfinite().all()
    assert layer.parallel(x).isfinite().all()


def published_dijiang(phi_q: Tensor, phi_k: Tensor, v: Tensor, first: int = 0) -> Tensor:
    """(Q K^T) V of the authors' code with our gamma; queries begin at ``first``, there always 0."""
    gamma = log_retention_decay().exp().float()  # [H, 1]
    where = torch.arange(max(first + phi_q.shape[1], phi_k.shape[1]))
    queries, keys = where[first : first + phi_q.shape[1]], where[: phi_k.shape[1]]
    phi_q = phi_q * (gamma**queries).T.unsqueeze(-1)
    phi_k = phi_k / (gamma**keys).T.unsqueeze(-1)
    seen = queries.unsqueeze(1) >= keys
    return torch.einsum("bihk,bjhk,ij,bjhv->bihv", phi_q, phi_k, seen.float(), v)


def keep(x: Tensor, _: int) -> Tensor:
    return x
