"""A third family: a gated convolution whose outputs are added up with a decay.

v, g, a = W_mix norm(x);  s_t = s_{t-1} e^-softplus(a_t) + silu(conv(v))_t
x = x + W_out (norm(s_t) gain silu(g_t))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from gguf import GGUFWriter
from torch import Tensor, nn
from torch.nn import functional as F

from model.architectures.config import JsonConfig
from model.architectures.network import ModelState, Network
from model.export.published import Planned, write_tensors
from model.tensor_spec import Shape, TensorSpec

EPS = 1e-5


@dataclass(frozen=True)
class ToyConfig(JsonConfig):
    model_type: ClassVar[str] = "toy"
    attention: ClassVar[str] = "toy"
    attention_options: ClassVar[dict[str, Any]] = {}
    constant_state: ClassVar[bool] = True
    num_attention_heads: ClassVar[int] = 1
    vocab_size: int
    hidden_size: int = 37
    head_dim: int = 37
    num_hidden_layers: int = 2
    conv_size: int = 3
    bos_token_id: int = 0
    eos_token_id: int = 0

    def layer_states(self) -> list[dict[str, TensorSpec]]:
        ring = TensorSpec((self.conv_size - 1, self.hidden_size))
        return [{"ring": ring, "sum": TensorSpec((self.hidden_size,))}] * self.num_hidden_layers

    def weight_shapes(self) -> dict[str, Shape]:
        size, width = self.vocab_size, self.hidden_size
        shapes = {"embedding.weight": (size, width), "head.weight": (size, width)}
        shapes["norm.weight"] = (width,)
        block = {"norm.weight": (width,), "conv": (width, self.conv_size), "gain": (width,)}
        block |= {"mix.weight": (3 * width, width), "out.weight": (width, width)}
        for layer in range(self.num_hidden_layers):
            shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
        return shapes

    def fixed_weights(self) -> frozenset[str]:
        return frozenset()


class Toy(Network):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        for name, shape in config.weight_shapes().items():
            module, (*path, last) = self, name.split(".")
            for part in path:
                module.add_module(part, module._modules.get(part) or nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(torch.empty(shape)))

    @property
    def head_weight(self) -> Tensor:
        return self.head.weight

    def init_weights(self, generator: torch.Generator) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.0, 0.4, generator=generator)

    def hidden_step(self, tokens: Tensor, state: ModelState, position: Tensor) -> Any:
        x, after = F.embedding(tokens, self.embedding.weight), []
        for block, layer in zip(self.blocks.children(), state, strict=True):
            v, gate, decay = F.linear(_norm(x, block.norm.weight), block.mix.weight).chunk(3, -1)
            rows = torch.cat([layer["ring"], v.unsqueeze(1)], 1)
            total = layer["sum"] * torch.sigmoid(-decay) + F.silu((rows * block.conv.T).sum(1))
            x = x + F.linear(_norm(total, block.gain) * F.silu(gate), block.out.weight)
            after.append({"ring": rows[:, 1:], "sum": total})
        return _norm(x, self.norm.weight), tuple(after)

    def hidden_chunk(self, tokens: Tensor, state: ModelState, position: Tensor, *_: Any) -> Any:
        rows = []
        for column in tokens.T:
            x, state = self.hidden_step(column, state, position)
            rows.append(x)
        return torch.stack(rows, 1), state


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def native_options(config: ToyConfig, layout: Any) -> dict[str, str | float]:
    sizes = {"num_layers": config.num_hidden_layers, "conv_size": config.conv_size}
    return {"family": "toy", "eps": EPS, "state_bytes": layout.num_bytes, **sizes}


def write_gguf(path: Any, checkpoint: Any, dtype: str) -> None:
    writer = GGUFWriter(path, "toy")
    writer.add_block_count(checkpoint.config.num_hidden_layers)
    planned = [Planned(*item) for item in checkpoint.config.weight_shapes().items()]
    tensors = ((one.key, checkpoint.weights[one.key]) for one in planned)
    write_tensors(writer, planned, tensors, checkpoint, dtype)
