"""A multi-token head on the native runtime: torch's numbers, with what is its model's."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from model.native.runtime import DTYPES, Runtime, levels
from tests.multi_token_heads import from_start, in_torch
from tests.requirements import needs_native
from tests.tiny import tiny_checkpoint, tiny_head

pytestmark = needs_native

#: float16 rounds what the past keeps, and here alone.
TOLERANCE = 2e-3
#: Of a head whose weights are rounded, relative to the largest number.
ROUNDED = {"float32": 1e-3, "bfloat16": 0.05, "int8": 0.1, "int4": 0.6}
TEXT = list(range(5, 75))
Rows = npt.NDArray[np.float32]


@cache
def runtimes(dtype: str = "float32", level: str | None = None) -> tuple[Runtime, Runtime]:
    """The model's and its head's."""
    checkpoint, head = tiny_checkpoint("qwen35"), tiny_head()
    model = Runtime(checkpoint.config, checkpoint.weights, dtype, level=level)
    return model, Runtime(head.config, head.weights, dtype, level=level, base=model)


def hidden_of(model: Runtime, tokens: list[int]) -> Rows:
    model.run(model.empty_pool(1), [0], [0], [tokens], [None])
    return model.hidden(0, len(tokens))


def reference(hidden: Rows) -> Rows:
    """What the head gives for the text but its first token."""
    embedded = tiny_checkpoint("qwen35").model.get_parameter("embedding.weight")
    rows = embedded[torch.tensor([TEXT[1:]])], torch.tensor(hidden)[None]
    found: Rows = from_start(in_torch(tiny_head()), *rows)[0].detach().numpy()
    return found


def test_hidden_states_are_what_the_final_norm_gives() -> None:
    found = hidden_of(runtimes()[0], TEXT)
    model: Any = tiny_checkpoint("qwen35").model
    wanted = model.hidden_parallel(torch.tensor([TEXT]))[0].numpy()
    assert np.abs(found - wanted).max() < 2 * TOLERANCE


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_gives_torchs_numbers_at_each_level(dtype: str) -> None:
    for level in levels():
        model, head = runtimes(dtype, level)
        hidden = hidden_of(model, TEXT)[:-1]
        head.run(head.empty_pool(1), [0], [0], [TEXT[1:]], [None], hidden=hidden)
        found, wanted = head.hidden(0, len(TEXT) - 1), reference(hidden)
        assert np.abs(found - wanted).max() < ROUNDED[dtype] * np.abs(wanted).max(), level


def test_any_cut_gives_the_same_bits() -> None:
    model, head = runtimes()
    hidden, tokens = hidden_of(model, TEXT)[:-1], TEXT[1:]
    draw = head.draw(temperature=0.0)
    results = []
    for cut in (0, 1, 2, 17, 40, 68):
        pool = head.empty_pool(1)
        if cut:
            head.run(pool, [0], [0], [tokens[:cut]], [None], hidden=hidden[:cut])
        drawn = head.run(pool, [0], [cut], [tokens[cut:]], [draw], hidden=hidden[cut:])
        results.append((drawn, head.logits().tobytes(), pool.tobytes()))
    assert all(result == results[0] for result in results)


def test_draw_is_at_its_offset() -> None:
    """Rows that a head has not read do not count for its state, and do for the seed."""
    model, head = runtimes()
    hidden = hidden_of(model, TEXT)[:-1]
    draw = head.draw(seed=7)

    def drawn(offset: int) -> list[list[int]]:
        pool = head.empty_pool(1)
        rows: Any = (pool, [0], [0], [TEXT[1:]], [draw])
        return head.run(*rows, hidden=hidden, draw_offset=offset)

    assert drawn(1000) == drawn(1000)
    assert len({token for offset in range(40) for (token,) in drawn(offset)}) > 10


def test_embedding_and_head_are_not_held_twice() -> None:
    model, head = runtimes()
    config = tiny_checkpoint("qwen35").config
    assert head.num_bytes < model.num_bytes - 4 * config.vocab_size * config.hidden_size


def test_hidden_states_of_another_shape_are_refused() -> None:
    model, head = runtimes()
    hidden = hidden_of(model, TEXT)
    wrong: list[Any] = [hidden, hidden[:-1, :-1], hidden[:-1].astype(np.float64), hidden[1::2]]
    for rows in wrong:
        with pytest.raises(ValueError, match="hidden states are not a contiguous array"):
            head.run(head.empty_pool(1), [0], [0], [TEXT[1:]], [None], hidden=rows)
    for first, num in ((-1, 2), (0, len(TEXT) + 1), (len(TEXT), 1)):
        with pytest.raises(ValueError, match="the last run has no such rows"):
            model.hidden(first, num)
