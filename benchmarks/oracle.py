"""The original of the bundled chat model, next to transformers and llama.cpp.

    python -m benchmarks.oracle

transformers reads the same file, and llama.cpp (`xllamacpp`) the same weights in a file of float32
that `everstream export` writes, since it multiplies blocks of Q4_1 in 8 bits. They, our reader on
torch and the native runtime each write 150 tokens in float32 after two prompts, always the
likeliest. Compared are the tokens, and their distributions up to the first token that differs. Keys
and values are float16 here, float32 there. Exits with 1 where a token differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.report import RESULTS, Figures, Result, command_line, show_figures
from benchmarks.round_trip.__main__ import same
from model.bundled_models import bundled_models
from model.checkpoint import Checkpoint, load_checkpoint
from model.convert.linearize.chats import CHAT_ML, encode
from model.export.llama import write_gguf
from model.hub.base import base_of
from model.native.runtime import Runtime
from model.tokenizer import Tokenizer

RESULT = RESULTS / "oracle_smollm2.json"
MODEL = "smollm2"
STORY = "Once upon a time there was a lighthouse on a small island, and"
QUESTION = "Why is the sky blue, and why is it red in the evening?"

Logits = npt.NDArray[np.float32]
#: Ids, and whether they begin a text, to the logits [V] after the last of them.
Read = Callable[[list[int], bool], Logits]
#: The likeliest tokens one after the other, and the distributions [N, V] in logarithms.
Written = tuple[list[int], npt.NDArray[np.float64]]


def prompts_of(tokenizer: Tokenizer) -> list[list[int]]:
    """A story's beginning, and a question as a chat has it."""
    chat = CHAT_ML.turn("user", QUESTION) + CHAT_ML.assistant
    return [tokenizer.encode(STORY), encode(tokenizer, chat)]


def open_by_transformers(file: Path) -> Any:
    """The model as the package reads it, which needs the packages gguf and accelerate."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )


def by_transformers(model: Any) -> Read:
    """By its own forward pass, with a cache."""
    cache: Any = None

    @torch.no_grad()
    def read(ids: list[int], begins: bool) -> Logits:
        nonlocal cache
        past = None if begins else cache
        answer = model(torch.tensor([ids]), past_key_values=past, use_cache=True)
        cache = answer.past_key_values
        logits: Logits = answer.logits[0, -1].numpy()
        return logits

    return read


def by_llama_cpp(checkpoint: Checkpoint, prompts: Sequence[list[int]], count: int) -> list[Written]:
    """By its server in a process of its own, without its flash attention, which adds up in 16 bits.

    Distributions have its `NUM_LISTED` likeliest ids, and NaN for the others.
    """
    written: list[Written] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "float32.gguf"
        write_gguf(file, checkpoint, "float32")
        asked = json.dumps({"file": str(file), "prompts": prompts, "count": count})
        command = [sys.executable, "-m", "benchmarks.oracle_llama_cpp", asked]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    for places in json.loads(said.splitlines()[-1]):
        rows = np.full((count, checkpoint.config.vocab_size), np.nan)
        for row, (_, listed) in zip(rows, places, strict=True):
            for token, log_p in listed:
                row[token] = log_p
        written.append(([token for token, _ in places], rows))
    return written


def on_torch(checkpoint: Checkpoint) -> Read:
    """By `Network.chunk`, and for a single token `Network.step`."""
    model = checkpoint.model
    state, position = model.empty_state(1), 0

    @torch.no_grad()
    def read(ids: list[int], begins: bool) -> Logits:
        nonlocal state, position
        if begins:
            state, position = model.empty_state(1), 0
        if len(ids) > 1:
            logits, state = model.chunk(torch.tensor([ids]), state, torch.tensor([position]))
            logits = logits[:, -1]
        else:
            logits, state = model.step(torch.tensor(ids), state, torch.tensor([position]))
        position += len(ids)
        return logits[0].numpy()

    return read


def on_native(checkpoint: Checkpoint) -> Read:
    """By the native runtime with one thread."""
    runtime = Runtime(checkpoint.config, checkpoint.weights, "float32")
    pool, draw, position = runtime.empty_pool(1), runtime.draw(temperature=0.0), 0

    def read(ids: list[int], begins: bool) -> Logits:
        nonlocal position
        if begins:
            pool[:], position = 0, 0
        runtime.run(pool, [0], [position], [ids], [draw])
        position += len(ids)
        return runtime.logits()[0]

    return read


def greedy(read: Read, prompt: list[int], num_tokens: int) -> Written:
    """``num_tokens`` after ``prompt``."""
    tokens: list[int] = []
    rows = []
    while len(tokens) < num_tokens:
        logits = read(tokens[-1:] or prompt, not tokens).astype(np.float64)
        logits -= logits.max()
        rows.append(logits - np.log(np.exp(logits).sum()))
        tokens.append(int(logits.argmax()))
    return tokens, np.stack(rows)


def compared(found: Sequence[Written], wanted: Sequence[Written]) -> Figures:
    """Over all prompts: tokens that are the same, differences of log p, and KL in nats.

    Where ``wanted`` has NaN nothing is compared, and there is no KL.
    """
    num_same = 0
    of_tokens, of_ids, divergences = [], [], []
    for (tokens, log_p), (theirs, log_q) in zip(found, wanted, strict=True):
        num_same += (end := same(tokens, theirs))
        p, q = log_p[: end + 1], log_q[: end + 1]
        differences = abs(p - q)
        of_ids.append(np.nanmax(differences))
        of_tokens.append(differences[np.arange(len(q)), theirs[: end + 1]].max())
        divergences.append((np.exp(q) * (q - p)).sum(axis=1))
    divergence = float(np.concatenate(divergences).mean())
    return {
        "same_tokens": num_same,
        "tokens": sum(len(tokens) for tokens, _ in wanted),
        "max_difference": float(max(of_tokens)),
        "max_difference_all_ids": float(max(of_ids)),
        "mean_kl": None if np.isnan(divergence) else divergence,
    }


def main(command: Sequence[str] | None = None) -> None:
    """Compares, prints, and ends with the line of JSON."""
    parser = command_line(__doc__, RESULT)
    parser.add_argument("--model", type=Path, default=bundled_models()[MODEL])
    parser.add_argument("--tokens", type=int, default=150, help="after each prompt")
    options = parser.parse_args(command)
    result = Result("oracle", options.output)
    torch.set_num_threads(1)
    file = base_of(options.model)
    checkpoint = load_checkpoint(file)
    prompts = prompts_of(checkpoint.tokenizer)

    def written(read: Read) -> list[Written]:
        return [greedy(read, prompt, options.tokens) for prompt in prompts]

    readers = {"torch": on_torch, "native": on_native}
    found = {name: written(read(checkpoint)) for name, read in readers.items()}
    wanted = {
        f"transformers {version('transformers')}": written(
            by_transformers(open_by_transformers(file))
        ),
        f"llama.cpp of xllamacpp {version('xllamacpp')}": by_llama_cpp(
            checkpoint, prompts, options.tokens
        ),
    }
    peers = {
        peer: {name: compared(ours, theirs) for name, ours in found.items()}
        for peer, theirs in wanted.items()
    }
    for peer, rows in peers.items():
        show_figures(f"{file.name} next to {peer}", rows)
    result.finish({"file": file.name, "peers": peers})
    all_rows = [row for rows in peers.values() for row in rows.values()]
    sys.exit(any(row["same_tokens"] < row["tokens"] for row in all_rows))


if __name__ == "__main__":
    main()
