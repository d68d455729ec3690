"""A torch model's weights and states in the forms that files and the native runtime have."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from model.architectures.network import ModelState
from model.state import StateLayout
from model.state_tensors import state_views


def weights_of(model: nn.Module) -> dict[str, npt.NDArray[np.float32]]:
    """Copies of a model's weights as a checkpoint has them."""
    return {name: tensor.float().numpy().copy() for name, tensor in model.state_dict().items()}


def pack_state(layout: StateLayout, state: ModelState, blocks: Tensor) -> None:
    """Copies ``state`` into ``blocks`` [B, num_bytes] uint8, in place."""
    views = state_views(layout, blocks)
    for field in layout.fields:
        views[field.layer][field.name].copy_(state[field.layer][field.name])
