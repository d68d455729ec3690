"""The sizes that are measured, and the same number of parameters in another architecture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Shapes = Mapping[str, tuple[int, ...]]

#: ggml quantizes rows in blocks of 32 numbers, so that the rows of a peer must be multiples of it.
BLOCK = 32


@dataclass(frozen=True)
class Size:
    """Width, depth and vocabulary; the head has weights of its own.

    ``intermediate_size`` is that of a SwiGLU next to four square matrices in each layer, as in a
    Llama and in our simplest mechanisms; it decides how many parameters every model of this
    size has, and an architecture with more in its attention gets a narrower MLP.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    head_dim: int = 64

    @property
    def num_parameters(self) -> int:
        """Parameters of a Llama of this size."""
        return count(llama_tensors(self, self.intermediate_size))


SIZES = {
    "S1": Size("S1", 8192, 256, 6, 4, 688),
    "S2": Size("S2", 32_000, 768, 12, 12, 2048),
    "tiny": Size("tiny", 512, 64, 2, 1, 160),
}


def count(tensors: Shapes) -> int:
    """Numbers in all tensors."""
    return sum(math.prod(shape) for shape in tensors.values())


def matching_width(count: Callable[[int], int], wanted: int) -> int:
    """The width of the feed-forward layer at which ``count(width)`` is nearest to ``wanted``."""
    per_unit = count(2) - count(1)
    return max(1, 1 + round((wanted - count(1)) / per_unit))


def peer_tensors(size: Size, architecture: str) -> dict[str, tuple[int, ...]]:
    """Tensors of a "llama" or "rwkv7" of at most as many parameters as ours, and within a block."""
    tensors = {"llama": llama_tensors, "rwkv7": rwkv7_tensors}[architecture]
    width = matching_width(lambda width: count(tensors(size, width)), size.num_parameters)
    return tensors(size, max(BLOCK, width // BLOCK * BLOCK))


def llama_tensors(size: Size, width: int) -> dict[str, tuple[int, ...]]:
    """GGUF names and shapes [out, in] of a Llama whose MLP is ``width`` wide."""
    d = size.hidden_size
    layer = {
        "attn_norm": (d,),
        "attn_q": (d, d),
        "attn_k": (d, d),
        "attn_v": (d, d),
        "attn_output": (d, d),
        "ffn_norm": (d,),
        "ffn_gate": (width, d),
        "ffn_up": (width, d),
        "ffn_down": (d, width),
    }
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (size.vocab_size, d),
        "output_norm.weight": (d,),
        "output.weight": (size.vocab_size, d),
    }
    for index in range(size.num_layers):
        tensors |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
    return tensors


def rwkv7_ranks(hidden_size: int) -> dict[str, int]:
    """Ranks of the low-rank matrices, as RWKV-7's own models choose them."""

    def rank(exponent: float, factor: float) -> int:
        return max(1, round(hidden_size**exponent * factor / 32)) * 32

    return {"w": rank(0.5, 1.8), "a": rank(0.5, 1.8), "v": rank(0.5, 1.3), "g": rank(0.8, 0.6)}


def rwkv7_tensors(size: Size, width: int) -> dict[str, tuple[int, ...]]:
    """GGUF names and shapes [out, in] of an RWKV-7 whose channel mix is ``width`` wide."""
    d, ranks = size.hidden_size, rwkv7_ranks(size.hidden_size)
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (size.vocab_size, d),
        "token_embd_norm.weight": (d,),
        "token_embd_norm.bias": (d,),
        "output_norm.weight": (d,),
        "output_norm.bias": (d,),
        "output.weight": (size.vocab_size, d),
    }
    vectors = ("w0", "a0", "v0", "k_k", "k_a", "r_k")
    layer: dict[str, tuple[int, ...]] = {f"time_mix_{name}.weight": (d,) for name in vectors}
    for name in ("attn_norm", "attn_norm_2", "time_mix_ln"):
        layer |= {f"{name}.weight": (d,), f"{name}.bias": (d,)}
    for name, rank in ranks.items():
        layer |= {f"time_mix_{name}1.weight": (rank, d), f"time_mix_{name}2.weight": (d, rank)}
    for name in ("key", "value", "receptance", "output"):
        layer[f"time_mix_{name}.weight"] = (d, d)
    layer["time_mix_lerp_fused.weight"] = (6, 1, 1, d)
    layer["channel_mix_lerp_k.weight"] = (1, 1, d)
    layer["channel_mix_key.weight"] = (width, d)
    layer["channel_mix_value.weight"] = (d, width)
    for index in range(size.num_layers):
        tensors |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    # llama.cpp wants them in the first layer too, where it does not use them, with another rank.
    tensors["blk.0.time_mix_v1.weight"] = (ranks["a"], d)
    tensors["blk.0.time_mix_v2.weight"] = (d, ranks["a"])
    return tensors
