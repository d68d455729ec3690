"""Bits per byte of a text on the native runtime, without torch.

The figure and the protocol are those of ``everstream eval`` with ``--mode
windows`` (`model.training.evaluate`): pieces of ``window`` tokens, each from
the empty state.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from model.evaluation import DataError, Evaluation, documents
from model.ops.cpu.runtime import Runtime
from model.tokenizer import Tokenizer


def evaluate(
    runtime: Runtime,
    tokenizer: Tokenizer,
    path: Path,
    window: int = 512,
    max_bytes: int | None = None,
) -> Evaluation:
    """Scores the text at ``path`` (the first ``max_bytes`` of each document, if given).

    Raises `DataError` for a text without content and for a ``window`` below 2.
    """
    if window < 2:
        raise DataError(f"window must be at least 2, not {window}")
    pool = runtime.empty_pool(1)
    nats, num_tokens, num_bytes = 0.0, 0, 0
    for document in documents(path):
        text = document.encode()[:max_bytes].decode("utf-8", "ignore")
        ids = tokenizer.encode(text)
        for part in _windows([tokenizer.eos_token_id, *ids], window):
            pool[:] = 0
            nats -= sum(runtime.score(pool, 0, 0, part))
        num_tokens += len(ids)
        num_bytes += len(text.encode())
    if not num_bytes:
        raise DataError(f"{path} holds no text to score")
    return Evaluation(nats, num_tokens, num_bytes)


def _windows(tokens: list[int], window: int) -> Iterator[list[int]]:
    """Pieces of ``window`` tokens to score, each after the one token before them."""
    for start in range(0, len(tokens) - 1, window):
        yield tokens[start : start + window + 1]
