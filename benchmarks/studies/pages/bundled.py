"""Figures within sentences of the README and the docs: of the default model, and of speed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.report import RESULTS, read_result
from benchmarks.studies.model_card.facts import read
from benchmarks.studies.pages.peers import comparison_cells
from model.bounds import DEFAULT_STATE_MEMORY_BYTES
from model.bundled_models import DEFAULT_MODEL, DEFAULT_NAME, bundled_models
from model.checkpoint import load_checkpoint
from model.config import ModelConfig
from model.families.llama.config import LlamaConfig
from model.state import StateLayout, kv_cache_bytes_per_token
from model.weights import num_parameters
from server.cli.inspect import format_bytes
from server.engine.sampling import published
from server.models.service import state_tensors

#: The tokens of the README's comparison of a state with a KV cache.
COMPARED_TOKENS = 100_000


class Place(NamedTuple):
    """Where a figure stands: ``pattern`` has a group for it, and is found once in ``page``.

    A space in it may be the end of a line on the page.
    """

    page: str
    pattern: str
    value: str


def filled(page: str, text: str) -> str:
    """The text of a page with the figures of now."""
    for place in places():
        if place.page == page:
            found = list(re.finditer(place.pattern.replace(" ", r"\s+"), text))
            assert len(found) == 1, (page, place.pattern, len(found))
            start, end = found[0].span(1)
            if found[0][1].split() != place.value.split():
                text = text[:start] + place.value + text[end:]
    return text


def places() -> Iterator[Place]:
    """Every figure."""
    config = ModelConfig.load(DEFAULT_MODEL / "config.json")
    num_bytes = StateLayout.of(config).num_bytes
    state, per_token = format_bytes(num_bytes), kv_cache_bytes_per_token(config)
    cache = f"{per_token * COMPARED_TOKENS / 2**20:.0f} MiB"
    millions = f"{num_parameters(config) / 1e6:.1f}M"
    readme = "README.md"
    yield Place(readme, r"everstream-stories` has (\S+) parameters", millions)
    yield Place(readme, r"constant: (\S+ \S+) for `everstream-stories`", state)
    chat = LlamaConfig.load(bundled_models()["smollm2"] / "config.json")
    chat_state = format_bytes(StateLayout.of(chat).num_bytes)
    yield Place(readme, r"(\S+ \S+) for `smollm2`; of hybrids", chat_state)
    yield Place(readme, r"stories` would need (\S+) bytes in bfloat16", f"{per_token:,}")
    yield Place(readme, r"prints: (\S+ MiB) at 100,000 tokens", cache)
    cells = r"\| tokens/s, one stream[^|]*\| ([^|]* \| [^|]*) \|"
    yield Place(readme, cells, " | ".join(comparison_cells()))
    seconds = read_result(RESULTS / "clone_to_token.json")["first_token_s"]
    yield Place(readme, r"that took (\S+) s besides the download", f"{seconds:.0f}")
    counts = [f"{memory // num_bytes:,}" for memory in (DEFAULT_STATE_MEMORY_BYTES, 2 << 30)]
    capacity = (
        f"{num_bytes:,} bytes per session, so the default of 512 MiB holds {counts[0]} sessions,"
        f" and 2 GiB hold {counts[1]}"
    )
    yield Place("docs/operate/sizing.md", r"The default model has (.* 2 GiB hold \S+)\.", capacity)
    listed = rf'"data": \[\{{"id": "{DEFAULT_NAME}".*?"everstream": (\{{.*\}})\}}\]\}}\n'
    yield Place("docs/reference/protocol.md", listed, json.dumps(_details(config)))


def _details(config: ModelConfig) -> dict[str, Any]:
    """As `/v1/models` shows the model on the native runtime."""
    layout = StateLayout.of(config)
    checkpoint = load_checkpoint(DEFAULT_MODEL)
    stored = read()["models"][DEFAULT_NAME]["stored_dtype"]
    return {
        "digest": f"{checkpoint.digest[:4]}...",
        "attention": config.attention,
        "dtype": stored,
        "parameters": num_parameters(config),
        "vocab_size": config.vocab_size,
        "state_bytes_per_session": layout.num_bytes,
        "fixed_state_bytes": layout.fixed_bytes,
        "state_bytes_per_token": 0,
        "context": config.context,
        "past": None,
        "kv_cache_bytes_per_token": kv_cache_bytes_per_token(config),
        "max_sessions": DEFAULT_STATE_MEMORY_BYTES // layout.num_bytes,
        "state": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "layers": tensor.layers,
                "bytes": tensor.bytes,
            }
            for tensor in state_tensors(layout)
        ],
        "sampling": published(),
        "chat": False,
        "thinking": False,
    }
