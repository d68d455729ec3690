"""Multi-token heads of Qwen3.5 as published, around a decoder layer of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from model.families.qwen35.network import Qwen35Mtp
from model.foreign import MultiTokenHead
from tests.hybrids import randomise


class PublishedHead(nn.Module):
    """Has the published names, all after ``mtp.``, and random weights."""

    def __init__(self, config: PretrainedConfig, seed: int = 0) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            setattr(self, name, Qwen3_5RMSNorm(width, eps=eps))
        layer = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, layer)])
        self._rotary = [Qwen3_5TextRotaryEmbedding(config)]  # in a list: it has no weights
        randomise(self, one_plus=True, seed=seed)
        self.eval().requires_grad_(False)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[B, T, D] each: the embedding of a token, and the final norm's output before it."""
        both = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)
        x = self.fc(torch.cat(both, dim=-1))
        num = x.shape[1]
        mask = torch.full((num, num), -torch.inf).triu(1)[None, None]
        angles = self._rotary[0](x, torch.arange(num).expand(3, len(x), num))
        result: Tensor = self.norm(self.layers[0](x, angles, attention_mask=mask))
        return result

    def tensors(self) -> dict[str, Tensor]:
        """By their names in a folder."""
        return {f"mtp.{name}": tensor.clone() for name, tensor in self.state_dict().items()}


def in_torch(head: MultiTokenHead) -> Qwen35Mtp:
    """The reference with the head's weights."""
    config: Any = head.config
    network = Qwen35Mtp(config)
    weights = {name: torch.tensor(np.array(tensor)) for name, tensor in head.weights.items()}
    network.load_state_dict(weights)
    return network.eval().requires_grad_(False)


def from_start(head: Qwen35Mtp, embedded: Tensor, hidden: Tensor) -> Tensor:
    """What it gives for rows from the empty state on, with a past in float32."""
    state = tuple(
        {name: torch.zeros(len(hidden), *spec.shape) for name, spec in layer.items()}
        for layer in head.config.layer_states()
    )
    result: Tensor = head(embedded, hidden, state, torch.zeros(len(hidden), dtype=torch.int64))[0]
    return result
