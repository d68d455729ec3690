"""The bound of a model whose state has a past: what the operator states, or what memory allows."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from model.architectures.config import Config
from model.architectures.hybrid import MIN_CONTEXT, default_context, with_past
from model.checkpoint import Checkpoint
from model.families.llama.config import LlamaConfig
from model.files import ConfigError
from model.state import StateLayout
from model.tensor_spec import POSITION_BLOCK

Past = Literal["stop", "slide"]

#: Of the state pool, where the operator states none: of models with a constant state, and the
#: part of the machine's memory for those with a bounded past.
DEFAULT_STATE_MEMORY_BYTES = 512 << 20
BOUNDED_PART = 4
#: So many sessions fit at the default bound.
MIN_SESSIONS = 16
#: No shorter bound is chosen by itself: prompts of chats fit.
MIN_DEFAULT_CONTEXT = 2048


@dataclass(frozen=True)
class Bound:
    """What an operator may state of a bounded past; ``context`` None leaves it to the memory."""

    context: int | None = None
    past: Past = "stop"

    def __bool__(self) -> bool:
        return self.context is not None or self.past != "stop"


def bounded(
    checkpoint: Checkpoint, bound: Bound, memory: int | None = None, num_sessions: int | None = None
) -> Checkpoint:
    """The checkpoint with its bound; one with a constant state is left as it is.

    Where layers have windows, ``bound.context`` is what the longest of them keeps. ``memory`` is
    the size of the state pool in bytes, ``num_sessions`` how many sessions are to fit. Raises
    `ConfigError` where a bound is stated and the model can have none, or not this one.
    """
    config = checkpoint.config
    if not config.context:
        if isinstance(config, LlamaConfig) and config.windows:
            return _with_windows(checkpoint, config, bound)
        if bound:
            raise ConfigError(
                f"--context and --past are for models with attention layers: the state of"
                f" {config.attention} is constant"
            )
        return checkpoint
    context = bound.context
    if context is None:
        pool = memory or state_memory(config)
        context = _fitting(config, pool // (num_sessions or MIN_SESSIONS))
    elif context < MIN_CONTEXT:
        raise ConfigError(f"--context must be at least {MIN_CONTEXT}, not {context}")
    return replace(checkpoint, config=with_past(config, context, bound.past))


def _with_windows(checkpoint: Checkpoint, config: LlamaConfig, bound: Bound) -> Checkpoint:
    if bound.past != "stop":
        raise ConfigError(
            "--past is for models with a bounded past: this model's texts have no end"
        )
    if bound.context is None:
        return checkpoint
    return replace(checkpoint, config=config.with_longest_window(bound.context))


def bound_among(config: Config, bound: Bound) -> Bound:
    """What of ``bound`` is for a model that is served next to others."""
    if config.context:
        return bound
    longest = config.longest_window if isinstance(config, LlamaConfig) else 0
    return Bound(min(bound.context, longest)) if bound.context and longest else Bound()


def state_memory(config: Config) -> int:
    """Bytes of the state pool where the operator states none."""
    if not config.context:
        return DEFAULT_STATE_MEMORY_BYTES
    return max(DEFAULT_STATE_MEMORY_BYTES, machine_memory() // BOUNDED_PART)


def machine_memory() -> int:
    """Bytes of memory that this process may have: the machine's, or its container's."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def _fitting(config: Config, session_bytes: int) -> int:
    """The greatest power of two whose sessions have at most so many bytes, within the model's."""
    largest = default_context(config.max_context)
    layout = StateLayout.of(with_past(config, MIN_CONTEXT, "stop"))
    context = min(MIN_DEFAULT_CONTEXT, largest)
    while context < largest:
        longer = min(2 * context, largest)
        if layout.fixed_bytes + layout.group_bytes * longer // POSITION_BLOCK > session_bytes:
            break
        context = longer
    return context
