"""Does a model that was trained here read and write the same in other programs?

    python -m benchmarks.round_trip MODEL TEXT --transformers-python PYTHON --output FILE

A model of ours is exported (`everstream export`) in float32 in every form that its family has:
as GGUF, as a Hugging Face folder, an RWKV-7 also as a native ``.pth``. Everstream reads each of
them, llama.cpp the first, transformers the second (not of an RWKV-7, which it does not have), the
`rwkv` package the last. Bits per byte on TEXT, whose documents are each read from the empty state,
and the likeliest tokens after the beginning of each are compared with those of Everstream on torch
from MODEL itself, and the ids of the documents with those that llama.cpp makes. Exits with 1 where
they differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Figures, Result, command_line, show_figures
from model.architectures.hybrid import HybridConfig
from model.architectures.network import Network
from model.checkpoint import Checkpoint, load_checkpoint
from model.evaluation import documents
from model.export import WRITERS
from model.export.cli import Format, export_command
from model.native.runtime import Runtime, built
from model.tokenizer import Tokenizer

MAX_DIFFERENCE = 1e-4
WINDOW = 256
PROMPT_TOKENS = 16
NAMES: dict[Format, str] = {"pth": "model.pth", "hf": "hf", "gguf": "model.gguf"}
#: The form that each other program reads.
READS: dict[str, Format] = {"rwkv": "pth", "transformers": "hf", "llama": "gguf"}


@dataclass(frozen=True)
class Job:
    """What every program reads. ``texts`` are the ids of ``strings`` after that of the end of text.

    That first id is not scored.
    """

    strings: list[str]
    texts: list[list[int]]
    prompts: list[list[int]]
    num_tokens: int
    num_bytes: int

    def save(self, path: Path) -> Path:
        """The file that `benchmarks.round_trip.peers` reads."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        return path


@dataclass(frozen=True)
class Reading:
    """What a program made of a job; see `benchmarks.round_trip.peers`."""

    nats: float
    greedy: list[list[int]]
    ids: list[list[int]] | None = None
    version: str | None = None


def make_job(
    tokenizer: Tokenizer, text: Path, max_bytes: int, num_documents: int, num_tokens: int
) -> Job:
    """The first ``max_bytes`` of each of the first documents; a prompt from each."""
    whole = itertools.islice(documents(text), num_documents)
    strings = [document.encode()[:max_bytes].decode("utf-8", "ignore") for document in whole]
    texts = [[tokenizer.eos_token_id, *tokenizer.encode(string)] for string in strings]
    num_bytes = sum(len(string.encode()) for string in strings)
    return Job(strings, texts, [ids[:PROMPT_TOKENS] for ids in texts], num_tokens, num_bytes)


@torch.no_grad()
def read_on_torch(model: Network, job: Job) -> Reading:
    """By `Network.chunk` and, for new tokens, `Network.step`."""

    def chunks(ids: list[int]) -> Iterator[torch.Tensor]:
        nonlocal state
        state, position = model.empty_state(1), torch.zeros(1, dtype=torch.int64)
        for part in torch.tensor([ids]).split(WINDOW, dim=1):
            logits, state = model.chunk(part, state, position)
            position = position + part.shape[1]
            yield logits[0]

    state, nats, greedy = model.empty_state(1), 0.0, []
    for text in job.texts:
        logits = torch.cat(list(chunks(text[:-1]))).double()
        targets = torch.tensor(text[1:])
        nats += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    for prompt in job.prompts:
        *_, logits = chunks(prompt)
        found = [int(logits[-1].argmax())]
        for place in range(len(prompt), len(prompt) + job.num_tokens - 1):
            last, state = model.step(torch.tensor(found[-1:]), state, torch.tensor([place]))
            found.append(int(last[0].argmax()))
        greedy.append(found)
    return Reading(nats, greedy)


def read_on_native(runtime: Runtime, job: Job) -> Reading:
    """By the native runtime's scores; a greedy token is the likeliest to follow."""
    pool, nats, greedy = runtime.empty_pool(1), 0.0, []
    for text in job.texts:
        pool[:] = 0
        nats -= sum(runtime.score(pool, 0, 0, text[:-1], text[-1]))
    for prompt in job.prompts:
        pool[:] = 0
        fed, found, position = prompt, list[int](), 0
        while len(found) < job.num_tokens:
            _, top = runtime.score_top(pool, 0, position, fed, 0, 1)
            position += len(fed)
            found.append(top[-1][0][0])
            fed = found[-1:]
        greedy.append(found)
    return Reading(nats, greedy)


def read_by_peer(python: Path, peer: str, file: Path, job: Job) -> Reading:
    """By another program, in a process of its own. Raises `RuntimeError` with what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        job_file, result = job.save(Path(folder) / "job.json"), Path(folder) / "result.json"
        program = Path(__file__).parent / "peers.py"
        command = [str(python), str(program), peer, str(file), str(job_file), str(result)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{peer} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return Reading(**json.loads(result.read_text(encoding="utf-8")))


def compare(readings: dict[str, Reading], job: Job) -> dict[str, Figures]:
    """By program, with the first one's: bits per byte, and how many greedy tokens are the same.

    Where a program has a tokenizer: of how many strings it has the same ids.
    """
    wanted = next(iter(readings.values()))
    rows: dict[str, Figures] = {}
    for name, reading in readings.items():
        pairs = list(zip(reading.greedy, wanted.greedy, strict=True))
        rows[name] = {
            "bits_per_byte": reading.nats / math.log(2) / job.num_bytes,
            "difference": (reading.nats - wanted.nats) / math.log(2) / job.num_bytes,
            "greedy_tokens": sum(len(found) for found, _ in pairs),
            "same_greedy_tokens": sum(same(found, other) for found, other in pairs),
        }
        if reading.version is not None:
            rows[name]["version"] = reading.version
        if reading.ids is not None:
            pairs = list(zip(reading.ids, job.texts, strict=True))
            rows[name] |= {"strings": len(pairs)}
            rows[name] |= {"same_ids": sum(ids == text[1:] for ids, text in pairs)}
    return rows


def same(found: list[int], wanted: list[int]) -> int:
    """How many tokens are the same from the first on."""
    pairs = zip(found, wanted, strict=True)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(found))


def agrees(row: Figures) -> bool:
    """Whether a program read and wrote the same."""
    same_text = row["same_greedy_tokens"] == row["greedy_tokens"]
    same_ids = row.get("same_ids") == row.get("strings")
    return same_text and same_ids and abs(row["difference"]) <= MAX_DIFFERENCE


def readings(model: Path, folder: Path, job: Job, peers: dict[str, Path]) -> dict[str, Reading]:
    """Every program's; ``peers`` has the interpreters of those of `READS` that are there."""
    original = load_checkpoint(model)
    found = {"everstream, torch": read_on_torch(original.model, job)}
    if built():
        runtime = Runtime(original.config, original.weights, "float32", 1)
        found["everstream, native"] = read_on_native(runtime, job)
    files = {format: folder / name for format, name in exported(original).items()}
    for format, file in files.items():
        export_command(str(model), file, format, "float32")
        found[f"everstream, {format}"] = read_on_torch(load_checkpoint(file).model, job)
    for peer, format in READS.items():
        if peer in peers and format in files:
            found[f"{peer}, {format}"] = read_by_peer(peers[peer], peer, files[format], job)
    return found


def exported(checkpoint: Checkpoint) -> dict[Format, str]:
    """The files of the forms of `NAMES` that the model has, by the form."""
    known = WRITERS.get(checkpoint.config.attention, {})
    pure = isinstance(checkpoint.config, HybridConfig) and checkpoint.config.constant_state
    return {
        format: name
        for format, name in NAMES.items()
        if format in known and not (pure and format == "gguf")
    }


def arguments(argv: Iterable[str] | None) -> argparse.Namespace:
    """The command line, that of the process for None."""
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path, help="folder of a run's model")
    parser.add_argument("text", type=Path, help="UTF-8 text")
    for peer in READS:
        parser.add_argument(f"--{peer}-python", type=Path, help=f"Python interpreter with {peer}")
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument(
        "--max-bytes", type=int, default=4000, help="maximum bytes of each document"
    )
    parser.add_argument("--tokens", type=int, default=300, help="greedy tokens after each prompt")
    return parser.parse_args(None if argv is None else list(argv))


def main(argv: Iterable[str] | None = None) -> None:
    """Compares, prints, and ends with the line of JSON."""
    options = arguments(argv)
    result = Result("round_trip", options.output)
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(options.model)
    job = make_job(
        checkpoint.tokenizer, options.text, options.max_bytes, options.documents, options.tokens
    )
    named = {peer: getattr(options, f"{peer}_python") for peer in READS}
    peers = {name: python for name, python in named.items() if python}
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(readings(options.model, Path(folder), job, peers), job)
    show_figures("one model in other programs", rows)
    figures: dict[str, Any] = {
        "text": options.text.name,
        "bytes": job.num_bytes,
        "model": checkpoint.config.to_dict(),
        "programs": rows,
    }
    result.finish(figures)
    sys.exit(not all(map(agrees, rows.values())))


if __name__ == "__main__":
    main()
