"""Models of the published shapes in a real server: loading, memory, and what sessions cost.

    python -m benchmarks.checkpoints.family_sizes --models FOLDER

For each: seconds until the server takes work, the largest and the steady resident memory; bytes of
sessions with texts of several lengths, milliseconds of a fork of each, and of the first token after
a restart; `STREAMS` completions side by side; and a restart with sleeping sessions. Random weights
in bfloat16, served in int8, with the tokenizer of the bundled model.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.checkpoints.folders import config_of, folder_of
from benchmarks.checkpoints.published import LENGTHS, PUBLISHED
from benchmarks.checkpoints.sizes import loading, sleeping, streams
from benchmarks.process import ServerProcess, exit_on_sigterm
from benchmarks.report import RESULTS, Figures, Result, command_line
from benchmarks.sessions.server import first_token_s
from clients.python import Client
from model.weights import num_parameters

RESULT = RESULTS / "family_sizes.json"
DEFAULT = ("qwen35 0.8B", "qwen35 2B", "mamba2 130M", "mamba2 1.3B", "mamba Falcon 7B")
NUM_FORKS = 5
DTYPE = "int8"


def sessions(model: Path, context: list[str], folder: Path) -> list[Figures]:
    """Of each length: bytes of the state, a fork, and the first token after a restart."""
    command = ["--model", str(model), "--dtype", DTYPE, "--max-sessions", "4", *context]
    command += ["--store", str(folder / "store")]
    rows: list[Figures] = []
    ids = np.random.default_rng(0).integers(300, 4000, max(LENGTHS)).tolist()
    with ServerProcess(*command) as server, Client(server.url, timeout_s=1200) as client:
        names = []
        for length in LENGTHS:
            session = client.create_session()
            start = time.perf_counter()
            for begin in range(0, length, 2048):
                session.append(ids[begin : min(length, begin + 2048)])
            read = time.perf_counter() - start
            forks = []
            for _ in range(NUM_FORKS):
                start = time.perf_counter()
                (fork,) = session.fork()
                first_token_s(fork)
                forks.append(time.perf_counter() - start)
                fork.delete()
            names.append(session.id)
            rows.append(
                {
                    "tokens": length,
                    "state_bytes": session.info().state_bytes,
                    "read_s": round(read, 2),
                    "fork_and_token_ms": _ms(forks),
                    "token_ms": _ms([first_token_s(session) for _ in range(NUM_FORKS)]),
                }
            )
        server.stop()
    with ServerProcess(*command) as server, Client(server.url, timeout_s=1200) as client:
        client.generate("Once", max_tokens=1).text()
        for row, name in zip(rows, names, strict=True):
            row["first_token_after_restart_ms"] = _ms([first_token_s(client.session(name))])
    return rows


def _ms(seconds: list[float]) -> float:
    return round(float(np.median(seconds)) * 1e3, 1)


def measure(name: str, models: Path, num_sleeping: int) -> Figures:
    """All figures of one model."""
    config, model = config_of(name), folder_of(models, name)
    context = ["--context", str(max(LENGTHS) + 64)] if config.context else []
    figures: Figures = {
        "model": name,
        "layers": config.num_hidden_layers,
        "parameters": num_parameters(config),
        "loading": loading(model, DTYPE),
    }
    with tempfile.TemporaryDirectory(dir=models) as folder:
        figures["sessions"] = sessions(model, context, Path(folder))
    many = ["--model", str(model), "--dtype", DTYPE, "--max-sessions", "64"]
    short = ["--context", "512"] if config.context else []
    with ServerProcess(*many, *short) as server:
        figures["streams"] = streams(server)
    with tempfile.TemporaryDirectory(dir=models) as folder:
        figures["sleeping"] = sleeping(model, DTYPE, Path(folder) / "store", num_sleeping)
    print(json.dumps(figures), file=sys.stderr, flush=True)
    return figures


def main() -> None:
    """Measures, writes the result after each model."""
    exit_on_sigterm()
    parser = command_line(__doc__, RESULT)
    names = [f"{family} {size}" for family, sizes in PUBLISHED.items() for size in sizes]
    parser.add_argument("--model", nargs="+", choices=names, default=DEFAULT)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--models", type=Path, help="folder to keep the files in between runs")
    options = parser.parse_args()
    result = Result("checkpoints.family_sizes", options.output)
    figures: Figures = {"served_in": DTYPE, "models": []}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.model:
            models = options.models or Path(folder)
            figures["models"].append(measure(name, models, options.sessions))
            result.save(figures)
    result.finish(figures)


if __name__ == "__main__":
    main()
