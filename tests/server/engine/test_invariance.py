from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model.architectures.network import model_of
from model.lm import LanguageModel
from server.engine.engine import Engine
from server.engine.torch_runner import MIN_USE, SIZES, batches, row_sizes
from server.engine.types import Event
from tests.server.engine.test_same_bits import PROMPT, SERVED
from tests.tiny import drain, finished, request, solo, state_of, tiny_checkpoint, tiny_engine

Perturb = Callable[[Tensor], Tensor]


class OtherProducts(TorchFunctionMode):
    """A matrix library of which each product with weights goes through ``perturb``."""

    def __init__(self, perturb: Perturb) -> None:
        super().__init__()
        self.perturb = perturb

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return self.perturb(result) if func is torch.nn.functional.linear else result


def by_place(product: Tensor) -> Tensor:
    """Another bit for each place among the rows."""
    place = torch.arange(len(product)).view(-1, *[1] * (product.dim() - 1))
    return product * (1 + place * 2.0**-22)


def last_by_place(product: Tensor) -> Tensor:
    """As a kernel does that takes 16 rows at a time, and what is left in another way."""
    return (
        torch.cat([product[:-1], product[-1:] * (1 + 2.0**-22)]) if len(product) % 16 else product
    )


def by_number(product: Tensor) -> Tensor:
    """Other bits below eight rows, and for an odd number of them."""
    return product * (1 + 2.0**-22) if len(product) % 8 else product


def fresh_model(attention: str = "gated", dtype: torch.dtype = torch.float32) -> LanguageModel:
    """One that has not been tried."""
    checkpoint = tiny_checkpoint(attention)
    return model_of(checkpoint.config, checkpoint.weights, dtype)


@pytest.mark.parametrize(
    ("perturb", "sizes"),
    [(by_place, (1,)), (last_by_place, (16, 32, 64)), (by_number, (8, 16, 32, 64))],
)
def test_sizes_that_disagree_are_not_used(perturb: Perturb, sizes: tuple[int, ...]) -> None:
    with OtherProducts(perturb):
        found = row_sizes(fresh_model())
    assert set(found) <= set(sizes)
    assert (len(found) > 1) == (len(sizes) > 1)


def states_and_tokens(engine: Engine, events: Iterable[Event]) -> tuple[bytes, list[Any]]:
    """The state's bytes, and the tokens with their log-probabilities."""
    tokens = [(e.token_id, e.logprob) for e in events if hasattr(e, "token_id")]
    return state_of(engine, str(finished(events).session)), tokens


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["gated", "vq", "window_linear", "delta"])
@pytest.mark.parametrize("perturb", [by_place, last_by_place, by_number])
def test_engine_serves_the_same_bits_on_any_matrix_library(
    attention: str, perturb: Perturb
) -> None:
    me = {"tokens": PROMPT, "keep": True, "max_tokens": 12, "seed": 7, "logprob": True}
    with OtherProducts(perturb):
        engine = tiny_engine(attention, model=fresh_model(attention))
        alone = states_and_tokens(engine, solo(engine, request("me", **me)))
        for i in range(21):
            engine.submit(request(f"other-{i}", PROMPT[i:], max_tokens=10 + i, seed=i), 0.0)
            if i == 9:
                engine.submit(request("me", **me), 0.0)
        assert states_and_tokens(engine, drain(engine)["me"]) == alone


def test_model_is_tried_once() -> None:
    model, products = fresh_model(), []
    with OtherProducts(lambda product: products.append(None) or product):  # type: ignore[func-returns-value]
        sizes = row_sizes(model)
        num_products = len(products)
        assert row_sizes(model) == sizes
    assert len(products) == num_products > 0


@pytest.mark.slow
@pytest.mark.parametrize("attention", SERVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_same_bits_in_all_sizes(attention: str, dtype: torch.dtype) -> None:
    """With other texts than the trial has, and as many as there are rows."""
    model = fresh_model(attention, dtype)
    sizes = row_sizes(model)
    tokens = torch.arange(3, 3 + sizes[-1])
    start = torch.zeros(sizes[-1], dtype=torch.int64)
    _, state = model.hidden_chunk(
        tokens.unsqueeze(1).expand(-1, 5), model.empty_state(sizes[-1]), start
    )

    def logits(rows: Tensor) -> Tensor:
        part = tuple({name: t[rows] for name, t in layer.items()} for layer in state)
        return model.step(tokens[rows], part, start[rows] + 5)[0]

    wanted = logits(torch.arange(sizes[-1]))
    for size in sizes:
        for rows in torch.arange(sizes[-1]).flip(0).split(size):
            assert torch.equal(logits(rows), wanted[rows])


@given(st.integers(1, 300), st.sets(st.sampled_from(SIZES), min_size=1))
def test_batches_hold_all_rows_and_little_more(num_rows: int, some: set[int]) -> None:
    sizes = tuple(sorted(some))
    parts = batches(num_rows, sizes)
    assert set(parts) <= some
    assert sum(parts[:-1]) < num_rows <= sum(parts)
    if parts[-1] != sizes[0]:
        assert num_rows - sum(parts[:-1]) >= MIN_USE * parts[-1]
