"""The drift benchmark: its float64 is float64 throughout, and it sees the failures it looks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.studies.drift.__main__ import Reader, growth, narrow, pieces, simulate, unscaled
from benchmarks.studies.drift.layers import HEAD_DIM, NAMES, make_layer, sums


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, HEAD_DIM, generator=generator(seed))


class Float32Operations(TorchDispatchMode):
    """Names of operations that returned a float32 tensor, or anything narrower."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.itemsize < 8:
                self.seen.add(str(func))
        return result


def float32_operations(reader: Reader) -> set[str]:
    """What a reader does in float32 in both forms, before and after its window is full."""
    x = tokens(140).double()
    with Float32Operations() as mode:
        reader.chunk(x[:70])
        reader.step(x[70:73])
        reader.chunk(x[73:])
    return mode.seen


@pytest.mark.parametrize("name", NAMES)
def test_reference_computes_nothing_below_float64(name: str) -> None:
    layer = make_layer(name, generator())
    assert float32_operations(Reader(layer))
    reader = Reader(layer, wide=True)
    assert float32_operations(reader) == set()
    assert all(t.itemsize == 8 for t in reader.state.values())
    assert next(layer.parameters()).dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_reference_reads_alike_in_chunks_and_steps(name: str) -> None:
    layer = make_layer(name, generator())
    x = tokens(150)
    by_chunks, by_steps = Reader(layer, wide=True).chunk(x), Reader(layer, wide=True).step(x)
    assert by_chunks.abs().max() > 0.01
    torch.testing.assert_close(by_chunks, by_steps, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "softmax"])
def test_state_after_a_long_text_still_changes_with_each_token(name: str) -> None:
    layer = make_layer(name, generator())
    figures = simulate(layer, 100, seed=1, past_tokens=512)
    assert 0 < figures["output"]["chunks"] < 1e-4
    assert 0 < figures["output"]["steps"] < 1e-4
    assert bool(figures["state"]) == bool(sums(layer))


def test_plain_float32_sum_stagnates_where_ours_does_not() -> None:
    state = simulate(make_layer("elu", generator()), 100, seed=1, past_tokens=512)["state"]
    assert state["float32"] > 0.9
    assert state["steps"] < 1e-6
    assert state["chunks"] < 1e-6


def test_errors_are_taken_at_every_stop_and_steps_end_early() -> None:
    errors = growth(make_layer("elu", generator()), [70, 1100, 1300], 1100, seed=1)
    assert list(errors["chunks"]) == [70, 1100, 1300]
    assert list(errors["steps"]) == [70, 1100]
    for by_stop in errors.values():
        assert all(0 < error < 1e-5 for error in by_stop.values())


def test_narrow_sums_are_worse_in_their_order() -> None:
    errors = narrow(make_layer("elu", generator()), [500], seed=1)
    ordered = [errors[name][500] for name in ("as it is", "float32", "float16", "bfloat16")]
    assert ordered == sorted(ordered)
    assert ordered[-1] > 0.05


def test_only_undecayed_sums_and_counts_are_stored_narrower() -> None:
    assert sums(make_layer("elu", generator())) == ["S", "z"]
    assert sorted(sums(make_layer("vq", generator()))) == ["count", "sum"]
    assert sums(make_layer("retnet", generator())) == []
    layer = make_layer("vq", generator())
    plain, stored = Reader(layer), Reader(layer, stored=torch.bfloat16)
    for reader in (plain, stored):
        reader.chunk(tokens(400))
    assert torch.equal(plain.state["v"], stored.state["v"])
    assert torch.equal(stored.state["sum"], plain.state["sum"].bfloat16().double())
    assert not torch.equal(stored.state["sum"], plain.state["sum"])


def test_pieces_cover_the_stream_and_end_at_each_stop() -> None:
    ends = [(position, len(x)) for position, x in pieces([10, 1500], generator())]
    assert ends == [(10, 10), (1034, 1024), (1500, 466)]


def test_sum_is_compared_at_one_scale() -> None:
    s = torch.ones(1, 2, 3, 4, dtype=torch.float64)
    low = {"S": s, "max": torch.zeros(1, 2, 3)}
    high = {"S": s / torch.e, "max": torch.ones(1, 2, 3)}
    torch.testing.assert_close(unscaled(low, "S", high), unscaled(high, "S", high))
    assert torch.equal(unscaled({"S": s}, "S", {"S": s}), s)
