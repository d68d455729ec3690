"""The servers that `peers` compares, each a process on a free port of the loopback."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx

from benchmarks.decode.shapes import SIZES
from benchmarks.process import LOCAL, ROOT, START_TIMEOUT_S, ServerError, ServerProcess
from benchmarks.serve.models import text_checkpoint

POLL_S = 0.1
#: Tokens of context that each of `llama-server`'s slots has, of which prompt and answer take part.
SLOT_TOKENS = 512

#: name -> what the load generator calls its requests
PEERS = {"llama": "llama", "rwkv7": "llama", "transformers": "openai"}
PLAIN = "transformers"
OURS = "everstream"


@dataclass(frozen=True)
class Target:
    """A server that runs: where, and in which dialect to speak to it."""

    name: str
    url: str
    pid: int
    dialect: str


class PeerProcess:
    """Somebody else's server on a free port, while the ``with`` block runs."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed in __exit__
        self._port = free_port()
        self.url = f"http://{LOCAL}:{self._port}"

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [*self._command, "--port", str(self._port)],
            cwd=ROOT,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        try:
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait(self) -> None:
        """Until ``/health`` is 200; before that some listen and some do not."""
        until = time.monotonic() + START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < until:
            try:
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(POLL_S)
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")[-4000:]
        raise ServerError(f"{self._command[0]} did not start:\n{log}")

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._log.close()


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as listener:
        listener.bind((LOCAL, 0))
        port: int = listener.getsockname()[1]
        return port


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
    tokenizer = text_checkpoint(models, SIZES[options.size], options.attention) / "tokenizer.json"
    if name == PLAIN:
        command = plain_command(options, tokenizer, threads)
    else:
        from benchmarks.decode.gguf import gguf_file

        model = gguf_file(models, SIZES[options.size], name, options.llama_type, tokenizer)
        command = llama_command(options.llama_server, model, max(options.streams), threads)
    server = stack.enter_context(PeerProcess(command))
    return Target(f"{name}, {threads}t", server.url, server.pid, PEERS[name])


def plain_command(options: argparse.Namespace, tokenizer: Path, threads: int) -> list[str]:
    """The command of `benchmarks.serve.plain`; it has no int8."""
    flags = {"--size": options.size, "--tokenizer": tokenizer, "--threads": threads}
    if options.dtype in ("float32", "bfloat16"):
        flags["--dtype"] = options.dtype
    parts = [str(part) for item in flags.items() for part in item]
    return [sys.executable, "-m", "benchmarks.serve.plain", *parts]


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
