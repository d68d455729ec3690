"""What is compared: the converted model in two sizes, its original, and two controls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.report import Figures
from model.architectures.hybrid import SINKS, with_past
from model.checkpoint import Checkpoint, load_checkpoint
from model.families.llama.config import LayerPlan, LlamaConfig
from model.hub.base import base_of
from model.state import StateLayout
from model.tensor_spec import POSITION_BLOCK

CONVERTED, ORIGINAL, WINDOW, WITHOUT_FAR = "converted", "original", "window", "without_far"
SHORTER = "shorter"
#: Tokens that its longest window keeps: a state of about 3 MB.
SHORTER_CONTEXT = 384
#: Tokens that the original keeps, as it is served; and where a question comes later.
CONTEXT, RECALL_CONTEXT = 2048, 4096


@dataclass(frozen=True)
class Subject:
    """One of the five; ``recall`` is the config with which it is asked for facts."""

    name: str
    checkpoint: Checkpoint
    config: LlamaConfig
    recall: LlamaConfig

    def state(self) -> Figures:
        """Bytes of a session's state, and of each token of a past that grows up to ``context``."""
        layout = StateLayout.of(self.config)
        grows = {"context": self.config.context, "recall_context": self.recall.context}
        return {
            "state_bytes": layout.num_bytes,
            "bytes_per_token": layout.group_bytes // POSITION_BLOCK,
            **(grows if self.config.context else {}),
        }


def subjects(folder: Path) -> Iterator[Subject]:
    """Those of the model in ``folder``, which is an adapter over its original."""
    converted, original = load_checkpoint(folder), load_checkpoint(base_of(folder))
    config, grows = converted.config, original.config
    assert isinstance(config, LlamaConfig)
    assert isinstance(grows, LlamaConfig)
    yield Subject(CONVERTED, converted, config, config)
    bounds = (with_past(grows, context, "slide") for context in (CONTEXT, RECALL_CONTEXT))
    yield Subject(ORIGINAL, original, *bounds)
    control = equal_window(grows, StateLayout.of(config).num_bytes)
    yield Subject(WINDOW, original, control, control)
    windows = tuple(LayerPlan(plan.window) for plan in config.windows)
    ablated = replace(config, windows=windows)
    yield Subject(WITHOUT_FAR, converted, ablated, ablated)
    shorter = config.with_longest_window(min(SHORTER_CONTEXT, config.longest_window // 2))
    yield Subject(SHORTER, converted, shorter, shorter)


def equal_window(config: LlamaConfig, num_bytes: int) -> LlamaConfig:
    """The same window in all layers, the shortest whose state is not below ``num_bytes``."""
    num_blocks = -(-num_bytes // StateLayout.of(config).group_bytes)
    plan = LayerPlan(num_blocks * POSITION_BLOCK - SINKS)
    return replace(config, context=0, past="stop", windows=(plan,) * config.num_hidden_layers)
