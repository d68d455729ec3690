"""How tokens are drawn where a client does not say: the one definition for API, page and terminal.

Chosen with ``python -m benchmarks.sampling``, which compares texts of the bundled model under
many settings with what people wrote (``benchmarks/results/sampling.json``): of the settings
without a penalty this one repeats itself and varies its words most nearly as they do. A lower
temperature repeats more, and without ``top_p`` the model invents words. There is no penalty:
greedy decoding stays greedy, and formats are not disturbed.
"""

from __future__ import annotations

from dataclasses import replace

from server.engine.types import SamplingParams

DEFAULTS = SamplingParams(temperature=1.0, top_p=0.9)

#: The fields whose defaults `/v1/models` names.
FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def with_defaults(**given: object) -> SamplingParams:
    """Sampling parameters in which every given value wins over its default."""
    return replace(DEFAULTS, **given)  # type: ignore[arg-type]


def published() -> dict[str, float]:
    """The defaults by the names that requests have for them."""
    return {name: getattr(DEFAULTS, name) for name in FIELDS}
