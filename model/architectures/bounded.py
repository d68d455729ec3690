"""The past of attention layers under a bound, which the operator states: ``context`` positions.

Keys and values of a position have a place each. Where the text has come to the bound, ``past``
decides: with "stop" it ends there. With "slide" the first `SINKS` positions stay and every further
one takes the place of the oldest other, so that a text has no end (Xiao et al. 2023, "Efficient
Streaming Language Models with Attention Sinks", arXiv 2309.17453).
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, TypeVar

from model.architectures.config import Config
from model.files import ConfigError
from model.tensor_spec import POSITION_BLOCK, DType, TensorSpec

#: Positions at the beginning of a text that never lose their place.
SINKS = 4
#: Of keys and values.
PAST_DTYPE: DType = "float16"
#: What happens at the bound.
PASTS = ("stop", "slide")
#: The smallest bound: a block of which the sinks leave most.
MIN_CONTEXT = 2 * POSITION_BLOCK


class Bounded(Protocol):
    """The fields of a config whose state is bounded and not constant."""

    @property
    def max_context(self) -> int:
        """The longest text that the model was made for."""

    @property
    def context(self) -> int: ...
    @property
    def past(self) -> str: ...


C = TypeVar("C", bound=Config)


def with_past(config: C, context: int, past: str) -> C:
    """``config`` with another bound, rounded up to whole blocks; for a config that has one."""
    context = -(-context // POSITION_BLOCK) * POSITION_BLOCK
    return dataclasses.replace(config, context=context, past=past)  # type: ignore[type-var]


def longest_text(config: Config) -> int | None:
    """Tokens that a text may have; None where there is no bound."""
    return config.context if config.context and config.past == "stop" else None


def check_bound(config: Bounded) -> None:
    """Raises `ConfigError` where ``context`` or ``past`` is not a possible one."""
    context = config.context
    if type(context) is not int or context < MIN_CONTEXT or context % POSITION_BLOCK:
        raise ConfigError(
            f"context must be a multiple of {POSITION_BLOCK} and at least {MIN_CONTEXT},"
            f" not {context!r}"
        )
    if config.past not in PASTS:
        raise ConfigError(f"past must be {' or '.join(map(repr, PASTS))}, not {config.past!r}")


def default_context(max_context: int) -> int:
    """The bound of a model whose operator states none: the model's own, in whole blocks."""
    return max(MIN_CONTEXT, max_context // POSITION_BLOCK * POSITION_BLOCK)


def place_of(position: int, context: int) -> int:
    """The place of ``position``: its own, or beyond the bound that of the oldest other."""
    if position < context:
        return position
    return SINKS + (position - SINKS) % (context - SINKS)


def past_state(
    context: int, num_heads: int, head_dim: int, per_position: bool = True
) -> dict[str, TensorSpec]:
    """Keys [blocks, H, F, positions] and values [blocks, H, positions, F] of an attention layer.

    Keys are turned, so that the scores of all positions of a block are computed side by side.
    ``per_position``: whether a short text uses a part of it alone.
    """
    blocks, size = context // POSITION_BLOCK, POSITION_BLOCK
    return {
        "k": TensorSpec((blocks, num_heads, head_dim, size), PAST_DTYPE, per_position),
        "v": TensorSpec((blocks, num_heads, size, head_dim), PAST_DTYPE, per_position),
    }
