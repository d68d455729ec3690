"""Bits per byte of a trained model, token by token: from an empty state, and with a longer past.

Three ways of reading the same tokens in the same order, so that they compare token by token:

- ``windows``   pieces of 512 tokens, each from the empty state;
- ``segments``  pieces of 4,096 tokens, each from the empty state (constant state alone);
- ``long``      a whole document: with the state carried, or, for a cache that grows, in windows
                that overlap by half, of which the second half counts.

A piece never crosses a document's end. What a bucket of positions gains by a past longer
than a window is its bits per byte in ``segments``, compared with the same tokens in ``windows``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from model.architectures.network import Network
from model.tokenizer import Tokenizer
from model.training.data import documents

WINDOW = 512
SEGMENT = 4096
WINDOW_BUCKETS = ((0, 32), (32, 64), (64, 128), (128, 256), (256, 512))
SEGMENT_BUCKETS = ((512, 1024), (1024, 2048), (2048, 4096))
#: Pieces scored side by side.
ROWS = 16

Autocast = Callable[[], AbstractContextManager[Any]]
Nats = NDArray[np.float64]


@dataclass(frozen=True)
class Document:
    """The start of a document: its ids, and the number of bytes of each."""

    ids: Tensor
    num_bytes: NDArray[np.int64]


def read_documents(path: Path, tokenizer: Tokenizer, max_bytes: int) -> list[Document]:
    """The first ``max_bytes`` of a text, shared evenly by its documents."""
    texts = [text for text in documents(path) if text.strip()]
    result = []
    for text in texts:
        ids = tokenizer.encode(text.encode()[: max_bytes // len(texts)].decode("utf-8", "ignore"))
        num_bytes = np.array([len(tokenizer.token_bytes(id)) for id in ids])
        result.append(Document(torch.tensor(ids), num_bytes))
    return result


@torch.no_grad()
def score(
    model: Network, eos_token_id: int, texts: list[Document], autocast: Autocast
) -> dict[str, Any]:
    """The figures of one text, for JSON. ``model`` is left in evaluation mode."""
    model.eval()
    constant = model.config.constant_state
    long = streamed if constant else sliding
    runs: dict[str, Nats] = {
        "windows": _concat(texts, lambda t: in_pieces(model, eos_token_id, t, WINDOW, autocast)),
        "long": _concat(texts, lambda t: long(model, eos_token_id, t, autocast)),
    }
    if constant:
        runs["segments"] = _concat(
            texts, lambda t: in_pieces(model, eos_token_id, t, SEGMENT, autocast)
        )
    num_bytes = np.concatenate([text.num_bytes for text in texts])
    position = np.concatenate([np.arange(len(text.ids)) for text in texts])
    return {
        "num_tokens": len(num_bytes),
        "num_bytes": int(num_bytes.sum()),
        "digest": _digest(texts),
        "bits_per_byte": {
            name: round(bits_per_byte(nats, num_bytes), 5) for name, nats in runs.items()
        },
        "long_is": "stream" if constant else "sliding",
        "buckets": buckets(runs, position, num_bytes),
    }


def bits_per_byte(nats: Nats, num_bytes: NDArray[np.int64]) -> float:
    """Of tokens that cost ``nats`` and have ``num_bytes`` each."""
    return float(nats.sum() / math.log(2) / num_bytes.sum())


def buckets(
    runs: dict[str, Nats], position: NDArray[np.int64], num_bytes: NDArray[np.int64]
) -> dict[str, dict[str, float]]:
    """Bits per byte by the number of tokens that a token can look back on.

    Up to a window it is counted in the window, past it in the segment; there
    ``same_in_windows`` is what the very same tokens cost with the shorter past.
    """
    result = {}
    for low, high in WINDOW_BUCKETS:
        inside = _between(position % WINDOW, low, high)
        if inside.any():
            value = bits_per_byte(runs["windows"][inside], num_bytes[inside])
            result[f"{low}-{high - 1}"] = {"bits_per_byte": round(value, 5)}
    for low, high in SEGMENT_BUCKETS if "segments" in runs else ():
        inside = _between(position % SEGMENT, low, high)
        if inside.any():
            result[f"{low}-{high - 1}"] = {
                "bits_per_byte": round(
                    bits_per_byte(runs["segments"][inside], num_bytes[inside]), 5
                ),
                "same_in_windows": round(
                    bits_per_byte(runs["windows"][inside], num_bytes[inside]), 5
                ),
            }
    return result


def in_pieces(
    model: Network, eos_token_id: int, text: Document, length: int, autocast: Autocast
) -> Nats:
    """Nats of each token; every ``length`` of them start from the empty state."""
    inputs, targets = _inputs(model, eos_token_id, text)
    num_pieces = -(-len(targets) // length)
    padding = num_pieces * length - len(targets)
    pieces = F.pad(inputs, (0, padding)).unflatten(0, (num_pieces, length))
    wanted = F.pad(targets, (0, padding)).unflatten(0, (num_pieces, length))
    parts = [
        torch.cat(list(_carried(model, x, y, autocast)), dim=1).flatten()
        for x, y in zip(pieces.split(ROWS), wanted.split(ROWS), strict=True)
    ]
    return torch.cat(parts)[: len(targets)].double().cpu().numpy()


def streamed(model: Network, eos_token_id: int, text: Document, autocast: Autocast) -> Nats:
    """Nats of each token with the state carried through the document."""
    inputs, targets = _inputs(model, eos_token_id, text)
    parts = _carried(model, inputs.unsqueeze(0), targets.unsqueeze(0), autocast)
    return torch.cat(list(parts), dim=1)[0].double().cpu().numpy()


def sliding(model: Network, eos_token_id: int, text: Document, autocast: Autocast) -> Nats:
    """Nats of each token in windows that overlap by half; the first half of a text counts too."""
    inputs, targets = _inputs(model, eos_token_id, text)
    half, parts = WINDOW // 2, []
    for start in range(0, len(targets), half):
        first, stop = max(0, start - half), start + half
        with autocast():
            x = model.hidden_parallel(inputs[None, first:stop])
        parts.append(_nats(model, x, targets[None, first:stop])[0, start - first :])
    return torch.cat(parts).double().cpu().numpy()


def _carried(
    model: Network, inputs: Tensor, targets: Tensor, autocast: Autocast
) -> Iterator[Tensor]:
    """Nats [B, <= WINDOW] of [B, T] tokens, the state carried from one window to the next."""
    if inputs.shape[1] <= WINDOW:
        with autocast():
            x = model.hidden_parallel(inputs)
        yield _nats(model, x, targets)
        return
    batch = inputs.shape[0]
    state = model.empty_state(batch)
    position = torch.zeros(batch, dtype=torch.int64, device=inputs.device)
    for x_part, y_part in zip(inputs.split(WINDOW, 1), targets.split(WINDOW, 1), strict=True):
        with autocast():
            x, state = model.hidden_chunk(x_part, state, position)
        position = position + x_part.shape[1]
        yield _nats(model, x, y_part)


def _nats(model: Network, x: Tensor, targets: Tensor) -> Tensor:
    """-log p of ``targets`` [B, T], the logits in float32 and of one row at a time."""
    weight = model.head_weight.float()
    return torch.stack(
        [
            F.cross_entropy(F.linear(row.float(), weight), y, reduction="none")
            for row, y in zip(x, targets, strict=True)
        ]
    )


def _inputs(model: Network, eos_token_id: int, text: Document) -> tuple[Tensor, Tensor]:
    device = model.head_weight.device
    targets = text.ids.to(device)
    return F.pad(targets[:-1], (1, 0), value=eos_token_id), targets


def _concat(texts: list[Document], scored: Callable[[Document], Nats]) -> Nats:
    return np.concatenate([scored(text) for text in texts])


def _between(values: NDArray[np.int64], low: int, high: int) -> NDArray[np.bool_]:
    return (values >= low) & (values < high)


def _digest(texts: list[Document]) -> str:
    """Tells whether two runs were scored on the same tokens."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.ids.numpy().tobytes())
    return digest.hexdigest()[:16]
