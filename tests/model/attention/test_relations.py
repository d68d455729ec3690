"""What one mechanism is to another: a special case, a limit or an approximation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from model.attention.base import Attention
from tests.model.attention.oracles import heads
from tests.model.attention.projections import rotary
from tests.model.attention.test_contract import CPU, assert_close, inputs, make_layer


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_soft_vq_with_a_large_beta_is_vq_without_a_window() -> None:
    soft = make_layer("soft_vq", {"beta": 1e6, "codewords": 16})
    hard = make_layer("vq", {"window": 1, "codewords": 16})
    share(soft, hard)
    soft.get_parameter("log_prior").zero_()
    hard.get_parameter("bias").zero_()
    hard.get_buffer("codebook").copy_(soft.get_parameter("codebook"))
    x = inputs(130)
    assert_close(soft.parallel(x), hard.parallel(x).double())


def test_simplified_performer_is_soft_vq_with_random_codewords() -> None:
    performer = make_layer("performer", {"map": "simplified", "features": 16})
    soft = make_layer("soft_vq", {"beta": 1.0, "codewords": 16})
    share(performer, soft)
    soft.get_parameter("log_prior").zero_()
    soft.get_parameter("codebook").copy_(performer.get_buffer("projection"))
    x = inputs(130)
    assert_close(soft.parallel(x), performer.parallel(x).double())


def test_simplified_features_are_those_of_favor_normalised_over_the_rows() -> None:
    layer = make_layer("performer", {"map": "simplified"})
    k, w = (
        torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(5)),
        layer.get_buffer("projection"),
    )
    _, simplified = layer.log_features(k, k)  # type: ignore[operator]
    favor = torch.einsum("thk,hfk->thf", k, w) - 0.5 * k.square().sum(-1, keepdim=True)
    weighted = favor - 0.5 * w.square().sum(-1)
    assert_close(simplified.exp(), weighted.softmax(-1).double())


@pytest.mark.parametrize("older", ["linear", "forgotten"])
def test_window_as_long_as_the_text_is_softmax(older: str) -> None:
    near = make_layer("window_linear", {"window": 130, "older": older})
    exact = make_layer("softmax", {})
    share(near, exact)
    x = inputs(130)
    assert_close(near.parallel(x), exact.parallel(x).double())
    assert (near.parallel(inputs(131)) - exact.parallel(inputs(131)))[:, -1].abs().max() > 1e-3


def test_taylor_kernel_approaches_softmax_with_its_order() -> None:
    """Of small q and k, whose exponential is nearly its first terms."""
    x = inputs(65) / 4
    exact = make_layer("softmax", {"rotary": "none"}).parallel(x)
    orders = make_layer("cosine", {}), make_layer("cosine", {"order": 2, "unit_length": False})
    first, second = ((layer.parallel(x) - exact).norm() for layer in orders)
    assert second < 0.05 * exact.norm()
    assert second < first / 5


def test_vq_with_a_codeword_for_every_key_is_softmax_without_positions() -> None:
    layer, x = make_layer("vq", {"codewords": 140, "window": 7}), inputs(70)
    layer.get_parameter("bias").zero_()
    q, k, v = project(layer, x)
    layer.get_buffer("codebook").copy_(k.transpose(0, 2).flatten(1, 2) * 8**-0.25)
    o = attend(torch.einsum("bihk,bjhk->bhij", q, k) / math.sqrt(8), v)
    assert_close(layer.parallel(x), layer.out(o).double())


def dot(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bihk,bjhk->bhij", q, k) / math.sqrt(8)


def gaussian(q: Tensor, k: Tensor) -> Tensor:
    squares = (q.unsqueeze(2) - k.unsqueeze(1)).square().sum(-1)  # [B, i, j, H]
    return -squares.permute(0, 3, 1, 2) / math.sqrt(8) / 2


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(
    ("name", "chosen", "log_kernel"),
    [("performer", {}, dot), ("performer", {"map": "hyperbolic"}, dot), ("rbf", {}, gaussian)],
)
def test_random_features_approach_their_kernel(
    name: str,
    chosen: dict[str, object],
    log_kernel: Callable[[Tensor, Tensor], Tensor],
    rotated: bool,
) -> None:
    """The error falls with the number of features, and with very many it is small."""
    x, errors = inputs(65) / 4, []  # small, because the variance grows with e^{|q|^2}
    for features in (8, 4096):
        options = {**chosen, "features": features, "rotary": "before" if rotated else "none"}
        layer = make_layer(name, options)
        q, k, v = project(layer, x)
        if rotated:
            q, k = rotary(q).float(), rotary(k).float()
        wanted = layer.out(attend(log_kernel(q, k), v))
        errors.append(((layer.parallel(x) - wanted).norm() / wanted.norm()).item())
    assert errors[1] < 0.05
    assert errors[1] < errors[0] / 5


@pytest.mark.parametrize("position", [1000, 10**9])
@pytest.mark.parametrize(
    ("name", "options", "relative"),
    [
        ("softmax", {}, True),
        ("cosine", {"rotary": "before"}, True),
        ("retnet", {}, True),
        ("retnet", {"positions": "rotary"}, True),
        ("elu", {"rotary": "after"}, True),
        ("elu", {"rotary": "before"}, False),
        ("performer", {"rotary": "before"}, False),
    ],
)
def test_positions_are_relative(
    name: str, options: dict[str, object], relative: bool, position: int
) -> None:
    """Where they are, a text may begin at any position, even a very late one."""
    layer, x = make_layer(name, options), inputs(70)
    start = torch.full((2,), position)
    late, _ = layer.chunk(x, layer.empty_state(2, CPU), start)
    early = layer.parallel(x).double()
    if relative:
        assert_close(late, early)
    else:
        assert (late - early).abs().max() > 0.01 * early.abs().max()


def share(a: Attention, b: Attention) -> None:
    for name in ("qkv.weight", "out.weight"):
        b.get_parameter(name).copy_(a.get_parameter(name))


def project(layer: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return heads(x @ layer.get_parameter("qkv.weight").T, layer)


def attend(scores: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention with the scores [B, H, i, j], heads side by side."""
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    p = scores.masked_fill(future, -math.inf).softmax(-1)
    return torch.einsum("bhij,bjhv->bihv", p, v).flatten(2)
