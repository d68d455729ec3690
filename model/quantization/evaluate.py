"""Bits per byte of a text on the native runtime, without torch.

The figure and the modes are those of `model.training.evaluate`, many times faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from model.evaluation import DataError, Evaluation, Half, Mode, check_fits, documents
from model.native.runtime import Runtime
from model.tokenizer import Tokenizer


def evaluate(
    runtime: Runtime,
    tokenizer: Tokenizer,
    path: Path,
    mode: Mode = "windows",
    window: int = 512,
    max_bytes: int | None = None,
    half: Half | None = None,
) -> Evaluation:
    """Scores the text at ``path``, or a ``half`` of it, the first ``max_bytes`` of each document.

    Raises `DataError` for a text without content and for a ``window`` below 2.
    """
    if window < 2:
        raise DataError(f"window must be at least 2, not {window}")
    pool, num_seen = runtime.empty_pool(1), 0
    nats, num_tokens, num_bytes = 0.0, 0, 0
    for document in documents(path, half):
        text = document.encode()[:max_bytes].decode("utf-8", "ignore")
        ids = tokenizer.encode(text)
        for part, position, num_scored in _pieces([tokenizer.eos_token_id, *ids], mode, window):
            if position == 0:
                pool[:, : runtime.layout.used_bytes(num_seen)] = 0
            num_seen = position + len(part) - 1
            check_fits(runtime.config, num_seen)
            scores = runtime.score(pool, 0, position, part[:-1], part[-1])
            nats -= sum(scores[-num_scored:])
        num_tokens += len(ids)
        num_bytes += len(text.encode())
    if not num_bytes:
        raise DataError(f"{path} holds no text to score")
    return Evaluation(nats, num_tokens, num_bytes)


def _pieces(tokens: list[int], mode: Mode, window: int) -> Iterator[tuple[list[int], int, int]]:
    """What is read at once, in order.

    The tokens, the last of which is not fed; how many the state has seen, 0 for the empty
    state; and how many of the last tokens are scored.
    """
    num_tokens, step = len(tokens) - 1, window // 2 if mode == "sliding" else window
    for start in range(0, num_tokens, step):
        first = max(0, start - step) if mode == "sliding" else start
        end = min(start + step, num_tokens)
        yield tokens[first : end + 1], start if mode == "stream" else 0, end - start
