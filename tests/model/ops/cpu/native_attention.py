"""One layer of attention as the native runtime computes it, behind the contract's interface.

The runtime knows whole models only, so one is built around the layer whose
tokens are the rows of x. Its residual stream has three parts, [x, y, c]: the
embedding of a token puts x into the first and c into the last, the attention
reads the first and writes y into the second, and the head shows y and c. With
c^2 = SIZE^2 - |x|^2 the norm before the attention divides every row by the
same number, which its weight undoes, and y is found again from c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from model.attention.base import Attention, Losses, State
from model.config import ModelConfig
from model.native.runtime import Runtime
from model.state import StateLayout

#: More than the length of any x that the contract's tests feed.
SIZE = 2.0**16
#: Weights that read x.
READ_X = ("qkv.weight", "gate.weight", "decay_down.weight", "decay.weight", "beta.weight")
WRITE_Y = ("out.weight", "out.bias")


class NativeAttention(Attention):
    """The same weights as ``layer``; forward only, float32."""

    def __init__(self, layer: Attention, level: str | None = None) -> None:
        super().__init__(layer.config)
        for name, module in layer.named_children():
            self.add_module(name, module)
        for name, parameter in layer.named_parameters(recurse=False):
            self.register_parameter(name, nn.Parameter(parameter.detach().clone()))
        for name, buffer in layer.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.level = level

    @torch.no_grad()
    def chunk(
        self, x: Tensor, state: State, position: Tensor, losses: Losses = None
    ) -> tuple[Tensor, State]:
        """One call gives the state; one call per token gives the same and each output."""
        batch, length, width = x.shape
        runtime, tail = self._runtime(x)
        tokens, starts = (
            np.arange(batch * length).reshape(batch, length).tolist(),
            position.tolist(),
        )
        pool, stepped = self._pool(state), self._pool(state)
        slots, draw = list(range(batch)), runtime.draw(temperature=0.0)
        runtime.run(pool, slots, starts, tokens, [None] * batch)
        outputs = []
        for t in range(length):
            where = [start + t for start in starts]
            runtime.run(stepped, slots, where, [[row[t]] for row in tokens], [draw] * batch)
            outputs.append(runtime.logits()[:, : width + 1])
        assert pool.tobytes() == stepped.tobytes()
        shown = np.stack(outputs, axis=1).astype(np.float64)
        y = shown[..., :-1] / shown[..., -1:] * tail[..., None]
        return torch.from_numpy(y.astype(np.float32)), self._state(pool)

    def step(self, x: Tensor, state: State, position: Tensor) -> tuple[Tensor, State]:
        y, state = self.chunk(x.unsqueeze(1), state, position)
        return y.squeeze(1), state

    def _runtime(self, x: Tensor) -> tuple[Runtime, npt.NDArray[np.float64]]:
        """A model whose tokens are the rows of ``x`` [B, T, D], in order; c of each."""
        width, num_tokens = x.shape[-1], x.shape[0] * x.shape[1]
        config = self._config(max(num_tokens, width + 1))
        tail = np.sqrt(SIZE**2 - np.square(x.detach().double().numpy()).sum(-1))
        tail = tail.astype(np.float32).astype(np.float64)
        embedding = np.zeros((config.vocab_size, config.hidden_size), np.float32)
        embedding[:num_tokens, :width] = x.detach().reshape(num_tokens, width).numpy()
        embedding[:num_tokens, -1] = tail.reshape(-1)
        weights = {"embedding.weight": embedding, **self._weights(config)}
        return Runtime(config, weights, "float32", level=self.level), tail

    def _config(self, vocab_size: int) -> ModelConfig:
        c = self.config
        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=2 * c.hidden_size + 1,
            num_hidden_layers=1,
            num_attention_heads=c.num_attention_heads,
            head_dim=c.head_dim,
            intermediate_size=1,
            attention=c.attention,
            attention_options=c.attention_options,
            attention_bias=c.attention_bias,
            tie_word_embeddings=False,
        )

    def _weights(self, config: ModelConfig) -> dict[str, npt.NDArray[np.float32]]:
        """Of the model around the layer, all but the embedding."""
        width, hidden = self.config.hidden_size, config.hidden_size
        head = np.zeros((config.vocab_size, hidden), np.float32)
        head[np.arange(width + 1), width + np.arange(width + 1)] = 1.0
        even = np.full(hidden, (SIZE**2 / hidden + config.rms_norm_eps) ** 0.5, np.float32)
        weights = {
            "head.weight": head,
            "norm.weight": np.ones(hidden, np.float32),
            "blocks.0.attention_norm.weight": even,
            "blocks.0.mlp_norm.weight": np.ones(hidden, np.float32),
            "blocks.0.mlp.up.weight": np.zeros((2, hidden), np.float32),
            "blocks.0.mlp.down.weight": np.zeros((hidden, 1), np.float32),
        }
        for name, tensor in self.state_dict().items():
            value = tensor.float().numpy()
            if name in READ_X:
                value = np.pad(value, [(0, 0), (0, hidden - width)])
            elif name in WRITE_Y:
                value = np.pad(value, [(width, 1), *[(0, 0)] * (value.ndim - 1)])
            weights[f"blocks.0.attention.{name}"] = value
        return weights

    def _pool(self, state: State) -> npt.NDArray[np.uint8]:
        layout, batch = self._layout(), len(next(iter(state.values())))
        pool = np.zeros((batch, layout.num_bytes), np.uint8)
        for name, view in layout.views(pool)[0].items():
            view[...] = state[name].numpy()
        return pool

    def _state(self, pool: npt.NDArray[np.uint8]) -> State:
        views = self._layout().views(pool)[0]
        return {name: torch.from_numpy(view.copy()) for name, view in views.items()}

    def _layout(self) -> StateLayout:
        return StateLayout.of(self._config(self.config.hidden_size + 1))
