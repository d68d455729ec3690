"""A Llama of a few thousand random weights, and a tokenizer of bytes."""

from __future__ import annotations

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from model.convert.linearize.plan import LlamaShape, Plan
from model.convert.linearize.source import Llama
from model.families.llama.config import LayerPlan
from model.tokenizer import Tokenizer

SHAPE = LlamaShape(
    vocab_size=260,
    hidden_size=24,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=40,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
)
#: A layer of each kind, with windows that their blocks divide in several ways.
PLAN = Plan((LayerPlan(8, "relative", 12), LayerPlan(12, "delta", 8), LayerPlan(6)), sinks=2)
#: One that a Llama of constant state can have: windows and first tokens fill whole blocks.
BLOCK_PLAN = Plan((LayerPlan(12, "relative", 12), LayerPlan(28, "delta", 8), LayerPlan(12)))
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny_llama(seed: int = 0, shape: LlamaShape = SHAPE) -> Llama:
    """Weights large enough that attention is not even."""
    generator = torch.Generator().manual_seed(seed)
    model = Llama(shape)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        else:
            scale = 0.4 if name == "embedding" else 1.5 * parameter.shape[1] ** -0.5
            parameter.data.normal_(0.0, scale, generator=generator)
    return model


def tiny_tokenizer(words: tuple[str, ...] = ()) -> Tokenizer:
    """A token for each byte, after the special ones, for "th", and for ``words``."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {name: id for id, name in enumerate((*SPECIAL, *letters, "th"))}
    backend = Backend(models.BPE(vocab=ids, merges=[("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    backend.add_tokens([AddedToken(word, normalized=False) for word in words])
    return Tokenizer.from_json(backend.to_str())


def tiny_ids(num_tokens: int, rows: int = 2, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SHAPE.vocab_size - 1, (rows, num_tokens), generator=generator)
