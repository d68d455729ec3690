from __future__ import annotations

import pytest
import torch

from model.lm import LanguageModel
from server.engine.invariance import MAX_CHUNKS, MAX_ROWS, chunk_batch, row_tile
from tests.server.engine.test_same_bits import SERVED
from tests.tiny import tiny_checkpoint


class Fussy(LanguageModel):
    """A model whose rows change their bits below ``least`` rows, as a library's kernels may."""

    least = 8
    never = False

    def step(self, tokens, state, position):  # type: ignore[no-untyped-def]
        logits, state = super().step(tokens, state, position)
        if self.never:
            places = torch.arange(len(tokens)).unsqueeze(1)
            return logits + places, state
        return (logits + 1e-6 if len(tokens) % self.least else logits), state

    def hidden_chunk(self, tokens, state, position, losses=None):  # type: ignore[no-untyped-def]
        x, state = super().hidden_chunk(tokens, state, position)
        return (x + 1e-6 if len(tokens) > 2 else x), state


@pytest.fixture
def fussy() -> Fussy:
    model = Fussy(tiny_checkpoint().config)
    model.load_state_dict(tiny_checkpoint().model.state_dict())
    return model.requires_grad_(False)


def test_finds_the_smallest_tile(fussy: Fussy) -> None:
    assert row_tile(fussy) == 8
    fussy.least = 1
    assert row_tile(fussy) <= 8


def test_refuses_a_library_that_never_agrees(fussy: Fussy) -> None:
    fussy.never = True
    with pytest.raises(RuntimeError, match="other bits"):
        row_tile(fussy)


def test_finds_the_largest_batch_of_chunks(fussy: Fussy) -> None:
    assert chunk_batch(fussy, 16) == 2


@pytest.mark.parametrize("attention", SERVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_models_have_safe_shapes(attention: str, dtype: torch.dtype) -> None:
    source = tiny_checkpoint(attention).model
    model = LanguageModel(source.config)
    model.load_state_dict(source.state_dict())
    model.to(dtype).requires_grad_(False)
    assert MAX_ROWS % row_tile(model) == 0
    assert 1 <= chunk_batch(model, 64) <= MAX_CHUNKS
