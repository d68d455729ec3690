"""Bits per byte and perplexity of a model on a text, on torch or on the native runtime.

Every document is scored from the end-of-text token as its start; the
end-of-text after it is not scored, since its name is not part of the text. Bits
per byte = (sum of -log2 p over all other tokens) / (bytes of the documents in
UTF-8), which does not depend on the tokeniser. The figure and the modes are the same on both; the
native runtime is many times faster and needs no torch, which is imported where it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from model.architectures.config import Config
from model.architectures.hybrid import longest_text
from model.tokenizer import END_OF_TEXT, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from model.architectures.network import Network
    from model.native.runtime import Runtime

#: The context that a token may use; see `evaluate`.
Mode = Literal["windows", "stream", "sliding"]
#: A part of a validation text; see `halved`.
Half = Literal["first", "second"]

#: A text of fewer documents consists of books, each of which is split in two.
MIN_DOCUMENTS = 10


class DataError(ValueError):
    """Texts that cannot be trained on or scored."""


def check_fits(config: Config, num_tokens: int) -> None:
    """Raises `DataError` where a piece of a text is longer than a model's bounded past."""
    longest = longest_text(config)
    if longest is not None and num_tokens > longest:
        raise DataError(
            f"{num_tokens} tokens are read at once, and the context is {longest}:"
            " give a larger --context, or --past slide"
        )


@dataclass(frozen=True)
class Evaluation:
    """``perplexity`` is per token; ``nats`` is the sum over all scored tokens."""

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.num_bytes

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.num_tokens)


def documents(path: Path, half: Half | None = None) -> Iterator[str]:
    """The documents of a UTF-8 text file, split at lines that hold only ``<|endoftext|>``.

    With ``half``, those of that half of the file (`halved`).
    """
    return _documents(path) if half is None else iter(halved(list(_documents(path)), half))


def halved(texts: Sequence[str], half: Half) -> list[str]:
    """One half of ``texts``, to select a model on the first and report it on the second.

    Of `MIN_DOCUMENTS` and more, every other document, from the first or from the second
    on, so that both halves have texts of every source. Of fewer, a part of each: up to
    the start of the paragraph that is nearest to its middle, or from there on. A
    paragraph begins after an empty line.
    """
    if len(texts) >= MIN_DOCUMENTS:
        return list(texts[0 if half == "first" else 1 :: 2])
    cuts = [(text, _middle(text)) for text in texts]
    parts = (text[:cut] if half == "first" else text[cut:] for text, cut in cuts)
    return [part for part in parts if part]


def _middle(text: str) -> int:
    """Where the paragraph begins that is nearest to the middle; the end where there is one."""
    starts = (match.end() for match in re.finditer(r"\n\s*\n", text))
    return min(starts, key=lambda start: abs(2 * start - len(text)), default=len(text))


def _documents(path: Path) -> Iterator[str]:
    lines: list[str] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip() == END_OF_TEXT:
                yield "".join(lines)
                lines = []
            else:
                lines.append(line)
    if "".join(lines).strip():
        yield "".join(lines)


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
    import torch

    if window < 2:
        raise DataError(f"window must be at least 2, not {window}")
    device = model.head_weight.device
    nats, num_tokens, num_bytes = 0.0, 0, 0
    with torch.no_grad():
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
    import torch

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


def evaluate_native(
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
