"""``speed``: training and decoding, all mechanisms in turn, as noise falls on all alike then.

Decoding is the model's own ``step``, greedily, without the server. The cache of a mechanism
whose state grows starts at each of ``contexts`` tokens; the others take as long at any.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.report import Figures
from benchmarks.studies.mechanisms.folder import Folder
from benchmarks.studies.mechanisms.language import Recipe, session_bytes, training
from benchmarks.studies.mechanisms.specs import SIZES, Spec
from model.architectures.network import ModelState
from model.attention import spec_of
from model.config import ModelConfig
from model.lm import LanguageModel
from model.tokenizer import Tokenizer
from model.training.loop import Run


@dataclass(frozen=True)
class SpeedRecipe:
    """What is timed in each round."""

    dtype: str
    rounds: int = 5
    train_steps: int = 3
    decode_steps: int = 48
    warm_up_steps: int = 8
    sessions: tuple[int, ...] = (1, 16)
    contexts: tuple[int, ...] = (512, 4096)


Samples = dict[str, list[float]]


def measure(
    folder: Folder, size: str, specs: list[Spec], recipe: Recipe, speed: SpeedRecipe
) -> dict[Spec, Figures]:
    """Medians over the rounds, whose order alternates so that drift cancels."""
    tokenizer = folder.prepare(list(recipe.data))
    configs = {
        s: s.config(SIZES[size], tokenizer.vocab_size, tokenizer.eos_token_id) for s in specs
    }
    samples: dict[Spec, Samples] = {spec: {} for spec in specs}
    for number in range(speed.rounds):
        for spec in specs if number % 2 == 0 else reversed(specs):
            config, sample = configs[spec], samples[spec]
            rate = training_rate(folder, tokenizer, config, recipe, speed)
            sample.setdefault("training", []).append(rate)
            for name, value in decoding_rates(config, speed).items():
                sample.setdefault(name, []).append(value)
    return {
        spec: {
            "kind": "speed",
            "size": size,
            "mechanism": str(spec),
            **session_bytes(configs[spec]),
            "recipe": asdict(speed),
            "tokens_per_s": {n: round(statistics.median(v), 1) for n, v in sample.items()},
            "rounds": {n: [round(rate, 1) for rate in v] for n, v in sample.items()},
        }
        for spec, sample in samples.items()
    }


def training_rate(
    folder: Folder, tokenizer: Tokenizer, config: ModelConfig, recipe: Recipe, speed: SpeedRecipe
) -> float:
    """Tokens/s of whole training steps, the optimiser's part included."""
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as stack:
        folder.share_cache(Path(work))
        run = Run(training(recipe, Path(work), seed=0), config, tokenizer)
        stack.callback(run.close)
        run.train_step()
        before = run.seconds
        for _ in range(speed.train_steps):
            run.train_step()
        return speed.train_steps * recipe.batch_size * recipe.window / (run.seconds - before)


@torch.inference_mode()
def decoding_rates(config: ModelConfig, speed: SpeedRecipe) -> dict[str, float]:
    """Tokens/s of all sessions together: ``decode_16``, or ``decode_16_at_512`` of a cache."""
    model = LanguageModel(config)
    model.init_weights(torch.Generator().manual_seed(0))
    model.to(getattr(torch, speed.dtype)).eval()
    constant = spec_of(config.attention).constant_state
    rates = {}
    for sessions in speed.sessions:
        for context in speed.contexts[:1] if constant else speed.contexts:
            name = f"decode_{sessions}" + ("" if constant else f"_at_{context}")
            rates[name] = sessions / seconds_per_step(model, sessions, context, speed)
    return rates


def seconds_per_step(
    model: LanguageModel, sessions: int, context: int, speed: SpeedRecipe
) -> float:
    """The mean over `decode_steps`, after a warm-up that also fills windows and caches."""
    tokens = torch.arange(sessions) % model.config.vocab_size
    state, position = filled(model, sessions, context)
    started = 0.0
    for step in range(speed.warm_up_steps + speed.decode_steps):
        if step == speed.warm_up_steps:
            started = time.perf_counter()
        logits, state = model.step(tokens, state, position)
        tokens, position = logits.argmax(dim=-1), position + 1
    return (time.perf_counter() - started) / speed.decode_steps


def filled(model: LanguageModel, sessions: int, context: int) -> tuple[ModelState, torch.Tensor]:
    """The state after ``context`` tokens; a cache holds noise, which takes as long to read."""
    generator = torch.Generator().manual_seed(0)
    position = torch.full((sessions,), context)
    if not spec_of(model.config.attention).constant_state:
        empty = model.empty_state(sessions)
        return tuple(
            {
                name: torch.randn([n or context for n in part.shape], generator=generator)
                for name, part in layer.items()
            }
            for layer in empty
        ), position
    text = torch.randint(model.config.vocab_size, (sessions, context), generator=generator)
    return model.hidden_chunk(text, model.empty_state(sessions), torch.zeros_like(position))[
        1
    ], position
