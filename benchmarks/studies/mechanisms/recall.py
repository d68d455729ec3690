"""``recall``: associative recall, the known weakness of linear attention.

A text of pairs, each a key and its value, and then all keys again in another order;
at each of these the model must say the value. After Arora et al. 2023 ("Zoology",
multi-query associative recall), without fillers. In two forms:

- ``joined``  a pair is one position, the sum of two embeddings: nothing but memory is asked for;
- ``apart``   a value follows its key, as in a text: a layer must also bring the two together,
              with positions, a convolution or a decay.

    k3+v9  k1+v4  k7+v9     k7 k3 k1        joined
    k3 v9  k1 v4  k7 v9     k7 k3 k1        apart
                            v9 v9 v4        the answers

Chance is 1 in `NUM_VALUES`; a model that only knows which values there were gets 1 in the
number of pairs. Of a mechanism with an exact window, only texts with more pairs than its window
holds measure the memory: shorter ones are looked up in the window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from benchmarks.report import Figures
from benchmarks.studies.mechanisms.folder import RunError
from benchmarks.studies.mechanisms.language import session_bytes
from benchmarks.studies.mechanisms.specs import Size, Spec
from model.config import ModelConfig
from model.lm import Block, LanguageModel
from model.training.optimizer import (
    gradients,
    learning_rate_factor,
    make_optimizers,
    prepare_step,
    set_rates,
)
from model.training.passes import Captured

NUM_KEYS = 128
NUM_VALUES = 64
NUM_PAIRS = (4, 8, 16, 32, 64)
#: Heads so narrow that 64 pairs are more than a layer's features; with 32 of them `elu` has room.
SIZE = Size(hidden_size=64, num_layers=2, num_heads=2, head_dim=16, intermediate_size=128)
#: The second part of a position that has none.
NOTHING = NUM_KEYS + NUM_VALUES
Form = Literal["joined", "apart"]
#: Test sequences are drawn from seeds that training never uses.
TEST_SEED = 1 << 32


@dataclass(frozen=True)
class RecallRecipe:
    """The same for all mechanisms. Each step has sequences of one number of pairs, in turn."""

    form: Form = "joined"
    num_steps: int = 500
    pairs_per_step: int = 1024
    optimizer: str = "muon"
    learning_rate: float = 1e-2
    weight_decay: float = 0.0
    warmup_steps: int = 50
    clip: float = 1.0
    num_test_sequences: int = 256
    device: str = "cpu"


def draw(
    form: Form, num_pairs: int, batch: int, generator: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Positions [batch, T, 2] of two ids each, and the answers [batch, num_pairs], int64.

    T is twice ``num_pairs``, or three times where pairs are ``apart``; the queries come last.
    Keys are different from each other, values need not be.
    """
    keys = generator.random((batch, NUM_KEYS)).argsort(axis=1)[:, :num_pairs]
    values = NUM_KEYS + generator.integers(NUM_VALUES, size=(batch, num_pairs))
    shuffled = generator.random((batch, num_pairs)).argsort(axis=1)
    pairs = np.stack([keys, values], axis=2)
    if form == "apart":
        pairs = _with_nothing(pairs.reshape(batch, 2 * num_pairs))
    queries = _with_nothing(np.take_along_axis(keys, shuffled, axis=1))
    answers = np.take_along_axis(values, shuffled, axis=1)
    return torch.from_numpy(np.concatenate([pairs, queries], axis=1)), torch.from_numpy(answers)


def run(spec: Spec, seed: int, recipe: RecallRecipe, size: Size = SIZE) -> Figures:
    """Trains a tiny model and measures it on fresh sequences; the figures of its file.

    Raises `RunError` where the loss is not finite.
    """
    config = spec.config(size, NOTHING + 1)
    assert isinstance(config, ModelConfig), spec
    model = LanguageModel(config)
    model.init_weights(torch.Generator().manual_seed(seed))
    model.to(recipe.device)
    started = time.monotonic()
    losses = train(model, seed, recipe)
    seconds = time.monotonic() - started
    return {
        "kind": "recall",
        "mechanism": str(spec),
        "seed": seed,
        "num_parameters": model.num_parameters(),
        **session_bytes(config),
        "recipe": dict(vars(recipe)),
        "config": config.to_dict(),
        "training": {"seconds": round(seconds, 1), "losses": losses},
        "accuracy": {
            str(num_pairs): round(accuracy(model, num_pairs, seed, recipe), 4)
            for num_pairs in NUM_PAIRS
        },
    }


def train(model: LanguageModel, seed: int, recipe: RecallRecipe) -> list[float]:
    """Mean losses over every twentieth part of the steps, in nats per answer."""
    model.train()
    training, losses = _Training(model, recipe), []
    for step in range(recipe.num_steps):
        num_pairs = NUM_PAIRS[step % len(NUM_PAIRS)]
        generator = np.random.default_rng((seed, step))
        drawn = draw(recipe.form, num_pairs, recipe.pairs_per_step // num_pairs, generator)
        losses.append(training.step(step, *drawn))
        if not math.isfinite(losses[-1]):
            raise RunError(f"the loss is {losses[-1]} at step {step}")
    part = max(1, recipe.num_steps // 20)
    return [
        round(float(np.mean(losses[start : start + part])), 4)
        for start in range(0, len(losses), part)
    ]


class _Training:
    """The steps; on a CUDA device one graph for each number of pairs."""

    def __init__(self, model: LanguageModel, recipe: RecallRecipe) -> None:
        self.model, self.recipe = model, recipe
        self.optimizers = make_optimizers(
            model, recipe.optimizer, recipe.learning_rate, recipe.weight_decay
        )
        self._graphs: dict[int, tuple[tuple[Tensor, Tensor], Captured[Tensor]]] = {}

    def step(self, step: int, positions: Tensor, answers: Tensor) -> float:
        """The loss in nats per answer."""
        recipe, num_pairs = self.recipe, answers.shape[1]
        factor = learning_rate_factor(step, recipe.num_steps, recipe.warmup_steps)
        if recipe.device == "cpu":
            prepare_step(self.optimizers, factor)
            return self._update(positions, answers).item()
        set_rates(self.optimizers, factor)
        drawn = positions.to(recipe.device), answers.to(recipe.device)
        if num_pairs not in self._graphs:
            captured = Captured(lambda: self._update(*drawn), self._changed)
            self._graphs[num_pairs] = drawn, captured
        fixed, captured = self._graphs[num_pairs]
        for tensor, value in zip(fixed, drawn, strict=True):
            tensor.copy_(value)
        return captured().item()

    def _update(self, positions: Tensor, answers: Tensor) -> Tensor:
        extra: list[Tensor] = []
        logits = _answers(self.model, positions, answers.shape[1], extra)
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        parameters = list(self.model.parameters())
        total = torch.stack([loss, *extra]).sum()
        for parameter, grad in zip(parameters, gradients(total, parameters), strict=True):
            parameter.grad = grad
        torch.nn.utils.clip_grad_norm_(parameters, self.recipe.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def _changed(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()
        for optimizer in self.optimizers:
            for values in optimizer.state.values():
                yield from values.values()


@torch.no_grad()
def accuracy(model: LanguageModel, num_pairs: int, seed: int, recipe: RecallRecipe) -> float:
    """The share of right values, the likeliest of all ids taken as the answer."""
    model.eval()
    generator = np.random.default_rng((TEST_SEED, seed, num_pairs))
    positions, answers = draw(recipe.form, num_pairs, recipe.num_test_sequences, generator)
    logits = _answers(model, positions.to(recipe.device), num_pairs, [])
    return float((logits.argmax(-1).cpu() == answers).float().mean())


def _answers(
    model: LanguageModel, positions: Tensor, num_pairs: int, losses: list[Tensor]
) -> Tensor:
    """Logits [batch, num_pairs, vocabulary] at the queries."""
    x = model.embedding(positions).sum(dim=2)
    for block in model.blocks:
        assert isinstance(block, Block)
        x = block.parallel(x, losses)
    return model.logits(model.norm(x)[:, -num_pairs:])


def _with_nothing(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """[batch, T] to positions [batch, T, 2] without a second part."""
    return np.stack([ids, np.full_like(ids, NOTHING)], axis=2)
