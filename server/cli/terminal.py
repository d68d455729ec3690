"""Generation in the terminal without a server: ``everstream generate``."""

from __future__ import annotations

import time
from collections.abc import Callable

from server.engine.engine import EngineConfig
from server.engine.types import Finished, Request, SamplingParams, TokenEvent
from server.models.backend import Backend


def generate(
    backend: Backend, prompt: str, sampling: SamplingParams, write: Callable[[str], None]
) -> str:
    """Writes the text as it comes; returns a line about speed and memory.

    Raises `InvalidRequest` for parameters out of range.
    """
    engine = backend.engine(1, EngineConfig(new_id=lambda: "terminal"))
    tokens = tuple(backend.tokenizer.encode(prompt))
    started = time.perf_counter()
    engine.submit(Request("terminal", "terminal", tokens, sampling), now=0.0)
    write(prompt)
    num_tokens = 0
    while engine.has_work():
        for event in engine.step(now=0.0):
            if isinstance(event, TokenEvent | Finished):
                write(event.text)
            if isinstance(event, Finished):
                num_tokens = event.usage.completion_tokens
    elapsed = time.perf_counter() - started
    state_bytes = engine.stats().state_bytes_per_session
    return (
        f"{num_tokens} tokens, {num_tokens / elapsed:.0f} tokens/s,"
        f" {state_bytes:,} bytes of state, seed {sampling.seed}"
    )
