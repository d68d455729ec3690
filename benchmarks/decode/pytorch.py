"""PyTorch: our own model eagerly and compiled, and `generate` of transformers' Llama.

A Llama's past is a cache of random keys and values; their values do not change its time.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM

from benchmarks.decode.models import config_of, random_weights, step_cost
from benchmarks.decode.peers import (
    PREFILL_TOKENS,
    Measured,
    Opened,
    Point,
    Steps,
    Unavailable,
    steps_until,
)
from benchmarks.decode.roofline import ITEM_BYTES, Cost, matrix_cost
from benchmarks.decode.shapes import SIZES, Size
from benchmarks.decode.softmax import llama_config
from benchmarks.machine import available_bytes
from model.architectures.network import model_of
from model.lm import LanguageModel

ATTENTION = "gated"
#: Chunks in which a prompt is read, as the server's torch path does.
CHUNK_TOKENS = 64
WARM_UP_STEPS = 3
GENERATED_TOKENS = 8
#: Of memory that is available, what a cache may take; it is copied whenever it grows.
MEMORY_PART = 0.3


class OwnTorch(Steps):
    """A `decode.peers.Contender`: `LanguageModel.step`, "eager" or with "compile"."""

    def __init__(self, models: Path, way: str) -> None:
        self._compiles = way == "compile"
        self._loaded: tuple[str, str] | None = None

    @torch.inference_mode()
    def open(self, point: Point) -> Opened:
        model = self._load(point)
        self._begin(point)
        self._state = model.empty_state(point.streams)
        self._tokens = torch.ones(point.streams, dtype=torch.int64)
        self._positions = torch.full((point.streams,), point.context)
        self._prompt = torch.randint(model.config.vocab_size, (1, PREFILL_TOKENS))
        for _ in range(WARM_UP_STEPS):
            self.run(0.0)
        cost = step_cost(model.config, ITEM_BYTES[point.dtype], self._step_tokens, point.streams)
        return Opened(point.dtype, model.num_parameters(), self._step_tokens, cost)

    @torch.inference_mode()
    def run(self, seconds: float) -> Measured:
        return super().run(seconds)

    def _load(self, point: Point) -> LanguageModel:
        torch.set_num_threads(point.threads)
        if self._loaded != (point.size, point.dtype):
            config = config_of(SIZES[point.size], ATTENTION)
            self._model = model_of(config, random_weights(config), _torch_dtype(point))
            self._loaded = (point.size, point.dtype)
        self._step: Any = self._model.step
        if self._compiles:
            torch.compiler.reset()
            self._step = torch.compile(self._model.step, dynamic=False)
        return self._model

    def _decode(self) -> None:
        logits, self._state = self._step(self._tokens, self._state, self._positions)
        self._tokens = logits.argmax(-1)
        self._positions = self._positions + 1

    def _prefill(self) -> None:
        state = self._model.empty_state(1)
        for first in range(0, PREFILL_TOKENS, CHUNK_TOKENS):
            tokens = self._prompt[:, first : first + CHUNK_TOKENS]
            x, state = self._model.hidden_chunk(tokens, state, torch.tensor([first]))
        self._model.logits(x[:, -1]).argmax()


class Generate:
    """A `decode.peers.Contender`: `generate`, greedily, with the default cache."""

    def __init__(self, models: Path) -> None:
        self._loaded: tuple[str, str] | None = None

    @torch.inference_mode()
    def open(self, point: Point) -> Opened:
        self._point, size = point, SIZES[point.size]
        wanted = point.streams * (point.context + GENERATED_TOKENS) * self._cache_bytes()
        if wanted > MEMORY_PART * available_bytes():
            raise Unavailable(f"its cache would take {wanted / 2**30:.1f} GiB")
        torch.set_num_threads(point.threads)
        self._load(size)
        self._cache: Any = DynamicCache(config=self._model.config)
        self._fill(size)
        length = PREFILL_TOKENS if point.mode == "prefill" else point.context + 1
        self._prompt = torch.randint(1, size.vocab_size, (point.streams, length))
        self.run(0.0)
        num_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        variant = f"{point.dtype}, dynamic cache"
        return Opened(variant, num_parameters, self._step_tokens(), self._cost())

    @torch.inference_mode()
    def run(self, seconds: float) -> Measured:
        if self._point.mode == "prefill":
            num_steps, elapsed = steps_until(seconds, time.perf_counter, self._prefill)
        else:
            num_steps, elapsed = steps_until(seconds, time.perf_counter, self._generate)
            num_steps *= GENERATED_TOKENS
        return Measured(num_steps * self._step_tokens(), elapsed)

    def _load(self, size: Size) -> None:
        dtype = _torch_dtype(self._point)
        if self._loaded != (size.name, self._point.dtype):
            config = llama_config(config_of(size, "elu"), size.intermediate_size)
            model: Any = LlamaForCausalLM(config)
            self._model = model.to(dtype).eval().requires_grad_(False)
            self._loaded = (size.name, self._point.dtype)

    def _generate(self) -> None:
        self._model.generate(
            self._prompt,
            attention_mask=torch.ones_like(self._prompt),
            past_key_values=self._cache if self._point.context else None,
            max_new_tokens=GENERATED_TOKENS,
            min_new_tokens=GENERATED_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        if self._point.context:
            self._cache.crop(self._point.context - self._cache.get_seq_length())

    def _prefill(self) -> None:
        answer = self._model(self._prompt, use_cache=True, logits_to_keep=1)
        answer.logits.argmax()

    def _fill(self, size: Size) -> None:
        """Random keys and values of ``context`` tokens; `generate` reads one more token first."""
        shape = (self._point.streams, size.num_heads, self._point.context, size.head_dim)
        for layer in range(size.num_layers if self._point.context else 0):
            past = torch.randn(shape, dtype=_torch_dtype(self._point))
            self._cache.update(past, past.clone(), layer)

    def _step_tokens(self) -> int:
        return PREFILL_TOKENS if self._point.mode == "prefill" else self._point.streams

    def _cache_bytes(self) -> int:
        """Of one token."""
        size = SIZES[self._point.size]
        return 2 * size.num_layers * size.hidden_size * ITEM_BYTES[self._point.dtype]

    def _cost(self) -> Cost:
        point, size, rows = self._point, SIZES[self._point.size], self._step_tokens()
        shapes = {
            name.removeprefix("model.").replace("lm_head", "head"): tuple(weight.shape)
            for name, weight in self._model.named_parameters()
        }
        cost = matrix_cost(shapes, ITEM_BYTES[point.dtype], rows, point.streams, "embed_tokens")
        half = PREFILL_TOKENS // 2 if point.mode == "prefill" else GENERATED_TOKENS // 2
        length = point.context + half
        operations = 4 * size.num_layers * size.hidden_size * length * rows
        return cost + Cost(self._cache_bytes() * length * point.streams, operations)


def _torch_dtype(point: Point) -> torch.dtype:
    """Raises `Unavailable` for a type in which these do not run."""
    if point.dtype in ("int8", "int4"):
        raise Unavailable(f"no {point.dtype} here")
    dtype: torch.dtype = getattr(torch, point.dtype)
    return dtype
