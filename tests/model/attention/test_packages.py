"""Where a package computes the same thing as a mechanism of ours, the outputs are equal.

Of a package that is not causal, the last token's output is compared, for texts
of several lengths.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.model.attention.packages import (
    dijiang_features,
    flash,
    linear_attention_transformer,
    log_retention_decay,
    normed_and_gated,
    performer_pytorch,
    project,
    softmax,
    torchscale,
)
from tests.model.attention.projections import rotary
from tests.model.attention.test_contract import assert_close, inputs, make_layer, run, steps


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


# flash-linear-attention: the recurrences, one token at a time.


@pytest.mark.parametrize("name", ["elu", "relu", "softmax_map"])
def test_positive_features_equal_flash_linear_attention(name: str) -> None:
    layer, x = make_layer(name, {}), inputs(70)
    feature_map = {"elu": lambda t: F.elu(t) + 1, "relu": F.relu, "softmax_map": softmax}[name]
    q, k, v = project(layer, x)
    o, (s, z) = flash("linear_attn").naive_recurrent_linear_attn(
        feature_map(q), feature_map(k), v, scale=1.0, normalize=True, output_final_state=True
    )
    y, state = run(layer, x, [70])
    assert_close(y, layer.out(o.flatten(2)).double())
    assert_close(state["S"], s.double())
    assert_close(state["z"], z[:, 0].double())


@pytest.mark.parametrize("positions", ["rotary", "none"])
def test_retention_equals_flash_linear_attention(positions: str) -> None:
    layer, x = make_layer("retnet", {"positions": positions}), inputs(70)
    q, k, v = project(layer, x)
    if positions == "rotary":
        q, k = rotary(q).float(), rotary(k).float()
    num = flash("retention").naive_retention(*(t.transpose(1, 2) for t in (q, k, v)))
    assert_close(layer.parallel(x), normed_and_gated(layer, num.transpose(1, 2), x).double())


def test_xpos_equals_a_decay_per_channel_in_flash_linear_attention() -> None:
    layer, x = make_layer("retnet", {"key_dim": 4}), inputs(70)
    q, k, v = project(layer, x, key_dim=4)
    zeta = torch.tensor([0.4, 0.9, 0.4, 0.9], dtype=torch.float64) / 1.4  # of pairs (0, 2), (1, 3)
    log_decay = (torch.log(zeta) / 512 + log_retention_decay()).float().expand_as(q)
    num, s = flash("gla").naive_recurrent_gla(
        rotary(q).float(), rotary(k).float(), v, log_decay, output_final_state=True
    )
    y, state = run(layer, x, [70])
    assert_close(y, normed_and_gated(layer, num, x).double())
    assert_close(state["S"], s.double())


def test_dijiang_equals_flash_linear_attention() -> None:
    """The DCT here is a Fourier transform of the mirrored vector."""
    layer, x = make_layer("dijiang", {}), inputs(70)
    phi_q, phi_k, v = dijiang_features(layer, x)
    log_decay = log_retention_decay().float().expand_as(phi_q)
    num, s = flash("gla").naive_recurrent_gla(
        phi_q * math.sqrt(8), phi_k, v, log_decay, output_final_state=True
    )
    y, state = run(layer, x, [70])
    assert_close(y, normed_and_gated(layer, num - num.mean(-1, keepdim=True), x).double())
    assert_close(state["S"], s.double())


@pytest.mark.parametrize("key_dim", [4, 8])
def test_gated_equals_flash_linear_attention(key_dim: int) -> None:
    layer, x = make_layer("gated", {"conv_size": 0, "key_dim": key_dim}), inputs(70)
    q, k, v = project(layer, x, key_dim)
    logit = layer.get_submodule("decay_up")(layer.get_submodule("decay_down")(x))
    num, s = flash("gla").naive_recurrent_gla(
        q, k, v, F.logsigmoid(logit).unflatten(-1, (2, -1)) / 16, output_final_state=True
    )
    y, state = run(layer, x, [70])
    assert_close(y, normed_and_gated(layer, num, x).double())
    assert_close(state["S"], s.double())


@pytest.mark.parametrize("function", ["naive_recurrent", "naive_chunk"])
def test_gated_delta_rule_equals_flash_linear_attention(function: str) -> None:
    layer, x = make_layer("delta", {"conv_size": 0}), inputs(70)
    q, k, v = project(layer, x)
    beta = torch.sigmoid(layer.get_submodule("beta")(x))
    rate = layer.get_parameter("decay_log").exp()
    log_decay = -rate * F.softplus(layer.get_submodule("decay")(x))
    rule = getattr(flash("gated_delta_rule"), f"{function}_gated_delta_rule")
    num, s = rule(q=unit(q), k=unit(k), v=v, beta=beta, g=log_decay, output_final_state=True)
    y, state = run(layer, x, [70])
    assert_close(y, normed_and_gated(layer, num, x).double())
    assert_close(state["S"], s.double())


def test_delta_rule_equals_flash_linear_attention() -> None:
    layer, x = make_layer("delta", {"conv_size": 0, "decay": False}), inputs(70)
    q, k, v = (t.transpose(1, 2) for t in project(layer, x))
    beta = torch.sigmoid(layer.get_submodule("beta")(x)).transpose(1, 2)
    num, s = flash("delta_rule").delta_rule_recurrence(unit(q), unit(k), v, beta)
    y, state = run(layer, x, [70])
    assert_close(y, normed_and_gated(layer, num.transpose(1, 2), x).double())
    assert_close(state["S"], s.double())


# torchscale: retention by its authors, in their three forms.


@pytest.mark.parametrize("form", ["parallel", "recurrent", "chunk"])
def test_retention_equals_torchscale(form: str) -> None:
    """With our angles: theirs are 10000^(-i/(K/2 - 1)), so that the last pair turns slowest."""
    retnet = torchscale()
    options: dict[str, object] = {"positions": "rotary", "key_dim": 12}
    layer = make_layer("retnet", options, rms_norm_eps=1e-12)  # their scales change an epsilon
    layer.get_parameter("norm_weight").fill_(1.0)
    x = inputs(64)
    args = Namespace(
        decoder_embed_dim=24,
        decoder_retention_heads=2,
        recurrent_chunk_size=16,
        layernorm_eps=1e-12,
        multiway=False,
    )
    theirs = retnet.MultiScaleRetention(args, embed_dim=24, value_dim=16, num_heads=2)
    q, k, v = layer.get_parameter("qkv.weight").split([24, 24, 16])
    projections = {
        "q": interleaved(q),
        "k": interleaved(k),
        "v": v,
        "g": layer.get_parameter("gate.weight"),
        "out": layer.get_parameter("out.weight"),
    }
    theirs.load_state_dict({f"{n}_proj.weight": w for n, w in projections.items()})
    positions = retnet.RetNetRelPos(args)
    positions.angle = (10_000.0 ** (-torch.arange(6) / 6)).repeat_interleave(2)
    if form == "recurrent":
        cache: dict[str, Tensor] = {}
        outputs = [
            theirs(
                x[:, t : t + 1],
                positions(t + 1, activate_recurrent=True),
                incremental_state=cache,
            )
            for t in range(64)
        ]
        wanted, actual = torch.cat(outputs, dim=1), steps(layer, x)[0]
    elif form == "chunk":
        wanted = theirs(x, positions(64, chunkwise_recurrent=True), chunkwise_recurrent=True)
        actual = run(layer, x, [16, 16, 16, 16])[0]
    else:
        wanted, actual = theirs(x, positions(64)), layer.parallel(x)
    assert_close(actual, wanted.double())


def interleaved(weight: Tensor) -> Tensor:
    """Rows of each head in the order of pairs (2i, 2i + 1) instead of (i, i + K/2)."""
    return weight.unflatten(0, (2, 2, 6)).transpose(1, 2).flatten(0, 2)


# performer-pytorch


def test_performer_equals_performer_pytorch_without_its_epsilon() -> None:
    """Token i is the last token of their attention, which is not causal, over i + 1 tokens."""
    performer = performer_pytorch()
    layer, x = make_layer("performer", {"features": 16}), inputs(65)
    q, k, v = (t.transpose(1, 2) for t in project(layer, x))
    y = layer.parallel(x)
    for length in (1, 2, 33, 65):
        outputs = []
        for head in range(2):
            part = (slice(None), slice(head, head + 1), slice(length))
            w = layer.get_buffer("projection")[head]
            phi_q, phi_k = (
                performer.softmax_kernel(t[part], projection_matrix=w, is_query=is_query, eps=0.0)
                for t, is_query in ((q, True), (k, False))
            )
            outputs.append(performer.linear_attention(phi_q, phi_k, v[part])[:, 0, -1])
        assert_close(y[:, length - 1], layer.out(torch.cat(outputs, dim=-1)).double())


def test_random_features_are_orthogonal_in_blocks_like_those_of_performer_pytorch() -> None:
    """Blocks of K orthogonal rows, as long as rows of independent normal numbers."""
    torch.manual_seed(0)
    theirs = performer_pytorch().gaussian_orthogonal_random_matrix(4096, 8)
    ours = make_layer("performer", {"features": 4096}).get_buffer("projection")[0]
    for w in (ours, theirs):
        for block in w.split(8):
            gram = block @ block.T
            assert (gram - gram.diag().diag()).abs().max() < 1e-4
        squares = w.square().sum(-1)  # chi-squared with K = 8 degrees of freedom
        assert squares.mean().item() == pytest.approx(8, rel=0.05)
        assert squares.var().item() == pytest.approx(16, rel=0.2)


# linear-attention-transformer


def test_efficient_equals_linear_attention_transformer() -> None:
    """Token i is the last token of their attention, which is not causal, over i + 1 tokens."""
    package = linear_attention_transformer()
    layer, x = make_layer("efficient", {}), inputs(65)
    q, k, v = (t.transpose(1, 2) for t in project(layer, x))
    y = layer.parallel(x)
    for length in (1, 2, 33, 65):
        o = package.linear_attn(*(t[:, :, :length] for t in (q, k, v)))[:, :, -1]
        assert_close(y[:, length - 1], layer.out(o.flatten(1) * math.sqrt(8)).double())


def test_causal_form_of_linear_attention_transformer_is_softmax_map() -> None:
    """One denominator over all features, with keys that are logarithms of a softmax."""
    layer, x = make_layer("softmax_map", {}), inputs(64)
    q, k, v = (t.transpose(1, 2) for t in project(layer, x))
    causal = linear_attention_transformer().causal_linear_attn
    o = causal(q, k.log_softmax(-1), v, bucket_size=1, eps=0.0)
    assert_close(layer.parallel(x), layer.out(o.transpose(1, 2).flatten(2)).double())


# What is not packaged, from its published formula.


def test_cosformer_equals_its_formula_within_the_horizon() -> None:
    """Eq. 10 of Qin et al. 2022, causal; M there is the horizon."""
    layer, x = make_layer("cosformer", {"horizon": 256}), inputs(65)
    q, k, v = project(layer, x)
    where = torch.arange(65)
    turn = torch.cos(math.pi / 2 * (where.unsqueeze(1) - where) / 256)
    weights = (torch.einsum("bihk,bjhk->bhij", q.relu(), k.relu()) * turn).tril()
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-6)
    o = torch.einsum("bhij,bjhv->bihv", weights, v)
    assert_close(layer.parallel(x), layer.out(o.flatten(2)).double())


def test_dijiang_equals_its_formula() -> None:
    """(Q K^T) V of the authors' code with our gamma."""
    layer, x = make_layer("dijiang", {}), inputs(65)
    phi_q, phi_k, v = dijiang_features(layer, x)
    powers = (log_retention_decay().exp().float() ** torch.arange(65)).T.unsqueeze(-1)
    seen = torch.ones(65, 65).tril()
    num = torch.einsum("bihk,bjhk,ij,bjhv->bihv", phi_q * powers, phi_k / powers, seen, v)
    num = num - num.mean(-1, keepdim=True)
    assert_close(layer.parallel(x), normed_and_gated(layer, num, x).double())


# What the tests share.


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
