"""Sums of states in bfloat16 have the same bits everywhere, and are those that torch rounds."""

from __future__ import annotations

import random

import pytest
import torch

from model.architectures.config import has_sums
from model.architectures.network import ModelState, model_of
from model.native.runtime import NOT_FINITE, levels
from model.state import StateLayout
from model.state_tensors import rounded, rounded_fields, state_views, widened
from tests.model.ops.cpu.models import (
    FUSED,
    ROUNDED,
    SERVED,
    random_tokens,
    small_model,
    small_runtime,
)
from tests.model.ops.cpu.test_same_bits import HALVED, LENGTHS, Result, alone, sequences, together
from tests.model.ops.cpu.test_targets import SEEN, TOKENS, States

NAMES = [name + ROUNDED for name in SERVED if has_sums(small_model(name)[0])]
#: Those whose sums are of what left a window.
WINDOWED = [name + ROUNDED for name in ("vq", "window_linear", "llama-windows")]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_batch_cuts_slots_and_threads_do_not_change_bits(name: str, threads: int) -> None:
    texts = sequences(name, LENGTHS)
    found = together(small_runtime(name, threads=threads), texts, random.Random(threads), 40)
    assert found == [alone(name, "float32", text) for text in texts]


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("name", [name + ROUNDED for name in HALVED])
def test_step_in_two_halves_is_the_same(name: str, level: str) -> None:
    runtime, texts = small_runtime(name, "float32", 3, level), sequences(name, (2, 3, 3, 2, 3))
    slots = list(range(61))
    pool, draws = runtime.empty_pool(61), [runtime.draw(temperature=0.0)] * 61
    taken = [texts[slot % 5] for slot in slots]
    runtime.run(pool, slots, [0] * 61, [text[:-1] for text in taken], draws)
    runtime.run(pool, slots, [len(t) - 1 for t in taken], [t[-1:] for t in taken], draws)
    wanted = [alone(name, "float32", text, level) for text in texts]
    for slot, logits in enumerate(runtime.logits()):
        assert Result(logits.tobytes(), pool[slot].tobytes()) == wanted[slot % 5]


@pytest.mark.parametrize("name", NAMES)
def test_calls_with_sources_and_targets_write_what_those_in_place_write(name: str) -> None:
    states = States(name, 3, None, SEEN)
    slots, counts = states.slots, list(TOKENS)
    wanted = states.written(states.pool.copy(), slots, counts)
    sources = [states.elsewhere(slot) if slot % 4 > 1 else None for slot in slots]
    targets = [states.elsewhere() if slot % 2 else None for slot in slots]
    pool = states.pool.copy()
    assert states.written(pool, slots, counts, sources, targets) == wanted


def test_long_text_in_segments_is_that_of_single_tokens() -> None:
    """Where what leaves the windows is summed in a phase of its own."""
    name = "llama-windows" + ROUNDED
    (text,) = sequences(name, (200,))
    runtime = small_runtime(name, threads=2)
    pool = runtime.empty_pool(1)
    runtime.run(pool, [0], [0], [text], [runtime.draw(temperature=0.0)])
    found = Result(runtime.logits()[0].tobytes(), pool[0].tobytes())
    assert found == alone(name, "float32", text)


@pytest.mark.parametrize("level", [level for level in levels() if level != "v2"])
@pytest.mark.parametrize("name", NAMES)
def test_levels_with_a_fused_multiply_add_agree(name: str, level: str) -> None:
    (text,) = sequences(name, (70,))
    assert alone(name, "float32", text, level) == alone(name, "float32", text, FUSED)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7F81, 0x7FFF, 0xFFFF])
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("name", [name + ROUNDED for name in ("gated", "delta", "rwkv7", "mamba2")])
def test_sum_that_is_not_finite_stays_so(name: str, level: str, bits: int) -> None:
    runtime, pool = small_runtime(name, level=level), small_runtime(name).empty_pool(1)
    sums = runtime.layout.views(pool)[0]["S"]
    sums[0, 0, 0, :] = bits
    tokens = [[token] for token in random_tokens(runtime.config, 5)]
    for position, token in enumerate(tokens):
        drawn = runtime.run(pool, [0], [position], [token], [runtime.draw(temperature=0.0)])
        assert drawn == [[NOT_FINITE]]
        assert (sums[0, 0, 0] & 0x7F80 == 0x7F80).all()


def torch_states(name: str, tokens: list[int]) -> ModelState:
    """The state after ``tokens`` as torch stores it."""
    config, weights = small_model(name)
    model, fields = model_of(config, weights), rounded_fields(StateLayout.of(config))
    state = model.empty_state(1)
    for i, token in enumerate(tokens):
        at = torch.tensor([i])
        _, state = model.hidden_step(torch.tensor([token]), widened(fields, state), at)
        state = rounded(fields, state, at)
    return state


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("name", NAMES)
def test_first_layer_is_rounded_as_on_torch(name: str, level: str) -> None:
    """But for numbers at a border between two; with other random bits a third or more differ."""
    config, _ = small_model(name)
    tokens = random_tokens(config, 40 if name in WINDOWED else 4)
    runtime = small_runtime(name, level=level)
    pool, layout = runtime.empty_pool(1), runtime.layout
    runtime.run(pool, [0], [0], [tokens], [None])
    found = state_views(layout, torch.from_numpy(pool))
    first = rounded_fields(layout)[0]
    wanted = torch_states(name, tokens)[first.layer][first.name]
    sums = found[first.layer][first.name]
    assert sums.dtype == torch.bfloat16
    assert wanted.any()
    assert (sums == wanted)[wanted != 0].float().mean() > 0.97
