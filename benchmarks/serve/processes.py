"""The servers that are compared, each a process on a free port, and a checkpoint that they serve.

Its weights are random, and it has a tokenizer of its own.
"""

from __future__ import annotations

import argparse
import random
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.decode.models import checkpoint
from benchmarks.decode.shapes import SIZES, Size
from benchmarks.process import LOCAL, PeerProcess, ServerProcess
from model.tokenizer import train_tokenizer

SYLLABLES = tuple(onset + vowel for onset in "bcdfghjklmnprstvwz" for vowel in "aeiou")
WORDS_PER_ID = 4
WORDS_PER_LINE = 12
#: Tokens of context that each of `llama-server`'s slots has, of which prompt and answer take part.
SLOT_TOKENS = 512

#: `llama-server` with models of these architectures.
PEERS = ("llama", "rwkv7")
OURS = "everstream"


def text_checkpoint(folder: Path, size: Size, attention: str) -> Path:
    """A `checkpoint` with a ``tokenizer.json`` of exactly ``size.vocab_size`` ids."""
    path = checkpoint(folder, size, attention)
    tokenizer = path / "tokenizer.json"
    if not tokenizer.exists():
        text = folder / "words.txt"
        text.write_text(invented_text(size.vocab_size), encoding="utf-8")
        trained = train_tokenizer([text], size.vocab_size)
        assert trained.vocab_size == size.vocab_size, trained.vocab_size
        trained.save(tokenizer)
    return path


def invented_text(vocab_size: int) -> str:
    """Lines of invented words, common and rare, enough of them to learn ``vocab_size`` ids from."""
    draw, num_words = random.Random(0), WORDS_PER_ID * vocab_size
    words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(num_words)]
    weights = [1 / rank for rank in range(1, num_words + 1)]
    return "\n".join(
        " ".join(draw.choices(words, weights, k=WORDS_PER_LINE)) for _ in range(vocab_size)
    )


@dataclass(frozen=True)
class Target:
    """A server that runs: where, and in which dialect of the API."""

    name: str
    url: str
    pid: int
    dialect: str


def start_ours(options: argparse.Namespace, models: Path, stack: ExitStack) -> Target:
    """`everstream serve` with a model of random weights."""
    size = SIZES[options.size]
    flags = ["--model", str(text_checkpoint(models, size, options.attention))]
    for name in ("dtype", "threads"):
        if value := getattr(options, name):
            flags += [f"--{name}", str(value)]
    server = stack.enter_context(ServerProcess(*flags))
    return Target(OURS, server.url, server.pid, "openai")


def start_peer(
    name: str, threads: int, options: argparse.Namespace, models: Path, stack: ExitStack
) -> Target:
    """One of `PEERS` with so many threads."""
    from benchmarks.decode.gguf import gguf_file

    tokenizer = text_checkpoint(models, SIZES[options.size], options.attention) / "tokenizer.json"
    model = gguf_file(models, SIZES[options.size], name, options.llama_type, tokenizer)
    command = llama_command(options.llama_server, model, max(options.streams), threads)
    server = stack.enter_context(PeerProcess(command))
    return Target(f"{name}, {threads}t", server.url, server.pid, "llama")


def llama_command(binary: str, model: Path, slots: int, threads: int) -> list[str]:
    """The command of `llama-server`, without what costs time and is not used here."""
    return [
        *(binary, "--model", str(model), "--host", LOCAL),
        *("--parallel", str(slots), "--ctx-size", str(slots * SLOT_TOKENS)),
        *("--threads", str(threads), "--threads-batch", str(threads), "--no-kv-unified"),
        *("--cache-ram", "0", "--ctx-checkpoints", "0", "--no-slots", "--log-disable"),
    ]


def best_llama_type() -> str:
    """The faster one of llama.cpp's types of 16 bits, by what the processor multiplies."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return "BF16" if "avx512_bf16" in flags else "F16"
