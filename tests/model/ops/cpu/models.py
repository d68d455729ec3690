"""Small models for the native runtime, and what they compute, in float64 and by torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from model.architectures.config import Config, with_state_dtype
from model.attention import MECHANISMS, spec_of
from model.attention.base import State
from model.config import ModelConfig
from model.lm import Block, LanguageModel
from model.native.runtime import Runtime, levels
from model.state import StateLayout
from tests import arwkv7, mamba
from tests.model.attention.oracles import ORACLES
from tests.model.attention.test_contract import double_weights
from tests.model.ops.cpu.hybrids import CONFIGS, config_of, random_weights
from tests.rwkv7 import SHAPES, our_weights, published
from tests.weights import weights_of

Pool = npt.NDArray[np.uint8]
#: Those that round the inputs of bfloat16 products.
ROUNDING_LEVELS = ("amx", "v4dot")
#: Levels with a fused multiply-add share their other bits; this is the plainest of them here, and
#: one of `ROUNDING_LEVELS` only where no other was built.
FUSED = next(level for level in ("v3", "v4", *levels()) if level in levels())
#: The mechanisms that the native runtime serves.
NAMES = [name for name in MECHANISMS if spec_of(name).constant_state]
#: Mamba models by their names here, with their sizes in `tests.mamba`.
MAMBA = {"mamba2": "odd", "mamba2_grouped": "grouped", "mamba": "first", "falcon": "falcon"}
#: And the other architectures that it serves.
SERVED = [
    *NAMES,
    *("rwkv7", "arwkv7", "qwen35", "lfm2", "lfm3", "llama", "llama-windows"),
    *("granite", "nemotron", "falcon-h1", "jamba", *MAMBA),
]
#: The end of a name of those with sums in their states: these are in bfloat16.
ROUNDED = "+bfloat16"


@dataclass(frozen=True)
class Shape:
    """What of a `ModelConfig` a test varies."""

    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, attention: str) -> ModelConfig:
        small = {
            "vocab_size": 257,
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 8,
            "intermediate_size": 36,
        }
        return ModelConfig(
            attention=attention, attention_options=self.options, **{**small, **self.settings}
        )


def make_model(config: ModelConfig, seed: int = 0) -> LanguageModel:
    """Random weights of every kind, none zero, that keep the activations near one."""
    model = LanguageModel(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    model.init_weights(generator)
    for name, parameter in model.named_parameters():
        scale = 1.0 if "embedding" in name else parameter.shape[-1] ** -0.5
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            parameter += 0.2 * noise
        else:
            parameter.copy_(scale * noise)
    return model


def small_weights(attention: str) -> tuple[ModelConfig, dict[str, npt.NDArray[np.float32]]]:
    """One model of each mechanism with states that change shape and turn within 70 tokens."""
    config, weights = small_model(attention)
    assert isinstance(config, ModelConfig)
    return config, weights


@cache
def small_model(name: str) -> tuple[Config, dict[str, npt.NDArray[np.float32]]]:
    """See `small_weights`; or a small model of another architecture, or one that is `ROUNDED`."""
    if name.endswith(ROUNDED):
        config, weights = small_model(name.removesuffix(ROUNDED))
        return with_state_dtype(config, "bfloat16"), weights
    if name == "rwkv7":
        shape = SHAPES["odd"]
        return shape.config, our_weights(shape, published(shape))
    if name in CONFIGS:
        return config_of(name), random_weights(name)
    if name in MAMBA:
        return mamba.SHAPES[MAMBA[name]], mamba.drawn(MAMBA[name])
    if name == "arwkv7":
        other = arwkv7.SHAPES["odd"]
        return other.config, arwkv7.our_weights(other, arwkv7.published(other))
    options = {"cosformer": {"horizon": 32}, "vq": {"window": 7}, "window_linear": {"window": 7}}
    config = Shape(options=options.get(name, {})).config(name)
    return config, weights_of(make_model(config))


@lru_cache(maxsize=24)
def small_runtime(
    attention: str, dtype: str = "float32", threads: int = 1, level: str | None = None
) -> Runtime:
    config, weights = small_model(attention)
    return Runtime(config, weights, dtype, threads, level)


def random_tokens(config: Config, length: int, seed: int = 5) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(config.vocab_size, (length,), generator=generator).tolist()
    return tokens


def feed(
    runtime: Runtime, pool: Pool, slot: int, tokens: Sequence[int], start: int = 0
) -> npt.NDArray[np.float32]:
    """Token by token; the logits after each, [T, vocabulary]."""
    draw, rows = runtime.draw(temperature=0.0), []
    for t, token in enumerate(tokens):
        runtime.run(pool, [slot], [start + t], [[token]], [draw])
        rows.append(runtime.logits()[0])
    return np.stack(rows)


def states(config: Config, block: Pool) -> tuple[State, ...]:
    """A session's block [num_bytes] as tensors [1, *shape] by layer."""
    views = StateLayout.of(config).views(block[None])
    return tuple({n: torch.from_numpy(v.copy()) for n, v in layer.items()} for layer in views)


def defined(model: LanguageModel, tokens: Sequence[int]) -> tuple[Tensor, tuple[State, ...]]:
    """Logits [T, vocabulary] and states in float64, attention from its oracle."""
    config, weights = model.config, double_weights(model)  # type: ignore[arg-type]
    x, after = _defined(model, tokens)
    head = weights["embedding.weight" if config.tie_word_embeddings else "head.weight"]
    return x @ head.T, after


def defined_hidden(model: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """What the final norm gives, [T, hidden_size], in float64, attention from its oracle."""
    return _defined(model, tokens)[0]


def _defined(model: LanguageModel, tokens: Sequence[int]) -> tuple[Tensor, tuple[State, ...]]:
    config, weights = model.config, double_weights(model)  # type: ignore[arg-type]
    where = torch.arange(len(tokens)).clamp_max(config.max_position_embeddings - 1)
    x = weights["embedding.weight"][list(tokens)]
    if config.max_position_embeddings:
        x = x + weights["position_embedding.weight"][where]
    x, after = x.unsqueeze(0), []
    for block in model.blocks:
        assert isinstance(block, Block)
        x, state = _block(block, double_weights(block), x)  # type: ignore[arg-type]
        after.append({name: tensor.double() for name, tensor in state.items()})
    return _norm(config, weights, "norm", x)[0], tuple(after)


def _block(block: Block, weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, State]:
    layer, config = block.attention, block.attention.config
    own = {name[10:]: value for name, value in weights.items() if name.startswith("attention.")}
    y, state = ORACLES[config.attention](layer, own, _norm(config, weights, "attention_norm", x))
    x = x + y
    up = _linear(weights, "mlp.up", _norm(config, weights, "mlp_norm", x))
    if config.mlp == "gelu":
        hidden = F.gelu(up, approximate="tanh")
    else:
        gate, value = up.chunk(2, dim=-1)
        hidden = gate * torch.sigmoid(gate) * value
    return x + _linear(weights, "mlp.down", hidden), state


def _norm(config: ModelConfig, weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    if config.norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
    return y * weights[f"{name}.weight"] + weights.get(f"{name}.bias", torch.zeros(()))


def _linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))


def relative_error(actual: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest number."""
    error = (actual.double() - wanted.double()).abs().max()
    return float(error / wanted.double().abs().max().clamp_min(1e-9))


def state_error(actual: Sequence[State], wanted: Sequence[State]) -> float:
    """The largest `relative_error` of a tensor; integers must be equal."""
    errors = [0.0]
    for found, expected in zip(actual, wanted, strict=True):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].shape == tensor.shape, name
            if not found[name].is_floating_point():
                assert torch.equal(found[name], tensor.long()), name
            else:
                errors.append(relative_error(found[name], tensor))
    return max(errors)
