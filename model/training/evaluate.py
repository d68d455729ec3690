"""Bits per byte and perplexity of a checkpoint on a text.

Every document is scored from the end-of-text token as its start; the
end-of-text after it is not scored, since its name is not part of the text. Bits
per byte = (sum of -log2 p over all other tokens) / (bytes of the documents in
UTF-8), which does not depend on the tokeniser.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from model.architectures.network import Network
from model.evaluation import DataError, Evaluation, Half, Mode, check_fits, documents
from model.tokenizer import Tokenizer

__all__ = ["Evaluation", "Mode", "evaluate"]


@torch.no_grad()
def evaluate(
    model: Network,
    tokenizer: Tokenizer,
    path: Path,
    mode: Mode = "windows",
    window: int = 512,
    max_bytes: int | None = None,
    half: Half | None = None,
) -> Evaluation:
    """Scores the text at ``path``, or a ``half`` of it, the first ``max_bytes`` of each document.

    ``windows``: pieces of ``window`` tokens, each from the empty state, so that
    mechanisms with and without a constant state see the same past. ``stream``:
    one pass over a document with the state carried. ``sliding``: windows that
    overlap by half, of which the second half is scored: the best a model can
    do whose past is bounded by its training window. Raises `DataError` for a
    text without content and for a ``window`` below 2.
    """
    if window < 2:
        raise DataError(f"window must be at least 2, not {window}")
    device = model.head_weight.device
    nats, num_tokens, num_bytes = 0.0, 0, 0
    for document in documents(path, half):
        text = document.encode()[:max_bytes].decode("utf-8", "ignore")
        ids = torch.tensor(tokenizer.encode(text), dtype=torch.int64, device=device)
        if not len(ids):
            continue
        start = torch.tensor([tokenizer.eos_token_id], device=device)
        inputs = torch.cat([start, ids[:-1]])
        for logits, targets in _scored(model, inputs, ids, mode, window):
            log_p = torch.log_softmax(logits.double(), dim=-1)
            nats -= float(log_p.gather(1, targets.unsqueeze(1)).sum())
        num_tokens += len(ids)
        num_bytes += len(text.encode())
    if not num_bytes:
        raise DataError(f"{path} holds no text to score")
    return Evaluation(nats, num_tokens, num_bytes)


def _scored(
    model: Network, inputs: Tensor, targets: Tensor, mode: Mode, window: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [N, vocabulary] and targets [N], which together cover every token once."""
    if mode == "sliding":
        half = window // 2
        for start in range(0, len(inputs), half):
            first = max(0, start - half)
            check_fits(model.config, len(inputs[first : start + half]))
            logits = model.parallel(inputs[None, first : start + half])[0]
            yield logits[start - first :], targets[start : start + half]
        return
    state, position = model.empty_state(1), torch.zeros(1, dtype=torch.int64, device=inputs.device)
    for start in range(0, len(inputs), window):
        part = inputs[None, start : start + window]
        check_fits(model.config, part.shape[1] + (start if mode == "stream" else 0))
        if mode == "windows":
            logits = model.parallel(part)
        else:
            logits, state = model.chunk(part, state, position)
            position = position + part.shape[1]
        yield logits[0], targets[start : start + window]
