"""Generation in the terminal without a server: ``everstream generate``."""

from __future__ import annotations

import time
from collections.abc import Callable

from model.checkpoint import Checkpoint
from server.engine.engine import Engine, EngineConfig
from server.engine.types import Finished, Request, SamplingParams, TokenEvent


def generate(
    checkpoint: Checkpoint, prompt: str, sampling: SamplingParams, write: Callable[[str], None]
) -> str:
    """Writes the text as it comes; returns a line about speed and memory.

    Raises `InvalidRequest` for parameters out of range.
    """
    engine = Engine(checkpoint, EngineConfig(max_sessions=1, new_id=lambda: "terminal"))
    tokens = tuple(checkpoint.tokenizer.encode(prompt))
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
