"""The servers that `peers` compares, each a process on a free port of the loopback."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.decode.shapes import SIZES
from benchmarks.process import LOCAL, PeerProcess, ServerProcess
from benchmarks.serve.models import text_checkpoint

#: Tokens of context that each of `llama-server`'s slots has, of which prompt and answer take part.
SLOT_TOKENS = 512

#: `llama-server` with models of these architectures.
PEERS = ("llama", "rwkv7")
OURS = "everstream"


@dataclass(frozen=True)
class Target:
    """A server that runs: where, and in which dialect to speak to it."""

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
