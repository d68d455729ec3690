"""Softmax models to compare with ours: as wide, deep and large, with a KV cache.

Their weights are random, and their caches are filled with random keys and values
instead of a text's: neither changes the time of a token, and a long context is
there at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.decode.models import own_parameters
from benchmarks.decode.shapes import matching_width
from model.architectures.network import ModelState
from model.config import ModelConfig
from model.lm import LanguageModel


class Peer(Protocol):
    """A model that decodes one stream on top of a cache."""

    name: str
    num_parameters: int

    def fill(self, position: int, room: int) -> None:
        """Starts over with a cache of ``position`` tokens, which at most ``room`` will follow."""

    def step(self) -> None:
        """Decodes one token."""

    def cache_bytes(self) -> int:
        """Bytes of the cache's tensors."""


class OwnSoftmax:
    """The training baseline of this project, `model.attention.softmax`."""

    name = "softmax, everstream's baseline"

    def __init__(self, config: ModelConfig, num_parameters: int, dtype: torch.dtype) -> None:
        shape = dataclasses.replace(config, attention="softmax", attention_options={})
        width = matching_width(lambda width: own_parameters(shape, width), num_parameters)
        self._model = LanguageModel(dataclasses.replace(shape, intermediate_size=width))
        self._model.init_weights(torch.Generator().manual_seed(0))
        self._model.to(dtype).eval().requires_grad_(False)
        self.num_parameters = self._model.num_parameters()
        self._state: ModelState = self._model.empty_state(1)
        self._position = torch.zeros(1, dtype=torch.int64)

    def fill(self, position: int, room: int) -> None:
        config = self._model.config
        shape = (1, config.num_attention_heads, position, config.head_dim)
        self._state = tuple(
            {"k": torch.randn(shape), "v": torch.randn(shape)}
            for _ in range(config.num_hidden_layers)
        )
        self._position = torch.tensor([position])

    def step(self) -> None:
        with torch.inference_mode():
            logits, self._state = self._model.step(torch.tensor([1]), self._state, self._position)
            logits.argmax()
        self._position += 1

    def cache_bytes(self) -> int:
        return sum(num_bytes(layer.values()) for layer in self._state)


class Llama:
    """``transformers``' LlamaForCausalLM with its default cache, or with one allocated ahead."""

    def __init__(
        self, config: ModelConfig, num_parameters: int, dtype: torch.dtype, static: bool
    ) -> None:
        from transformers import LlamaForCausalLM

        width = matching_width(lambda width: llama_parameters(config, width), num_parameters)
        self.name = f"softmax, transformers' Llama, {'static' if static else 'dynamic'} cache"
        self._static = static
        self._dtype = dtype
        self._config = llama_config(config, width)
        model: nn.Module = LlamaForCausalLM(self._config)
        self._model = model.to(dtype).eval().requires_grad_(False)
        self.num_parameters = sum(p.numel() for p in self._model.parameters())

    def fill(self, position: int, room: int) -> None:
        from transformers import DynamicCache, StaticCache

        self._cache: Any = (
            StaticCache(self._config, max_cache_len=position + room)
            if self._static
            else DynamicCache(config=self._config)
        )
        shape = (1, self._config.num_key_value_heads, position, self._config.head_dim)
        for layer in range(self._config.num_hidden_layers):
            past = torch.randn(shape, dtype=self._dtype)
            self._cache.update(past, past.clone(), layer)

    def step(self) -> None:
        with torch.inference_mode():
            answer = self._model(torch.tensor([[1]]), past_key_values=self._cache, use_cache=True)
            answer.logits.argmax()

    def cache_bytes(self) -> int:
        return sum(num_bytes((layer.keys, layer.values)) for layer in self._cache.layers)


def peers(config: ModelConfig, num_parameters: int, dtype: torch.dtype) -> list[Peer]:
    """All peers of a model of shape ``config``."""
    return [
        Llama(config, num_parameters, dtype, static=False),
        Llama(config, num_parameters, dtype, static=True),
        OwnSoftmax(config, num_parameters, dtype),
    ]


def llama_parameters(config: ModelConfig, width: int) -> int:
    """Parameters of such a Llama."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(config, width))
    return sum(parameter.numel() for parameter in model.parameters())


def llama_config(config: ModelConfig, width: int) -> Any:
    """Llama's configuration of the same shape."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=width,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=1 << 20,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=None,
    )


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
