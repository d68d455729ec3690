"""From a restored session to its first token: `everstream serve` and `llama-server`.

    python -m benchmarks.checkpoints.restore --llama-server PATH --models FOLDER

Both read the same random ids from the same GGUF file, keep what they have read (a kept session; a
saved slot), end, start again, and are asked for one more token. Their own start does not count.
`llama-server` is asked as its clients do it: the slot is restored, and the whole text sent again.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.checkpoints.shapes import CONFIGS, file_of
from benchmarks.process import LOCAL, PeerProcess, ServerProcess, exit_on_sigterm
from benchmarks.report import Figures, Result, command_line
from benchmarks.sessions.server import first_token_s
from benchmarks.studies.pages.models import RESTORE
from clients.python import Client

PIECE = 4096
TIMEOUT_S = 3600.0
SLOT = "slot.bin"


def ours(file: Path, ids: list[int], threads: int, folder: Path) -> Figures:
    """A kept session whose server was started again."""
    flags = ["--model", str(file), "--dtype", "int8", "--threads", str(threads)]
    flags += ["--max-sessions", "2", "--store", str(folder / "store")]
    with ServerProcess(*flags) as server, Client(server.url, timeout_s=TIMEOUT_S) as client:
        session = client.create_session()
        start = time.perf_counter()
        for begin in range(0, len(ids), PIECE):
            session.append(ids[begin : begin + PIECE])
        read = time.perf_counter() - start
        server.stop()
    with ServerProcess(*flags) as server, Client(server.url, timeout_s=TIMEOUT_S) as client:
        client.generate("Once", max_tokens=1).text()  # the first request of a process is slower
        first = first_token_s(client.session(session.id))
    return {"read_s": round(read, 2), "first_token_s": round(first, 4)}


def llama(server: str, file: Path, ids: list[int], threads: int, folder: Path) -> Figures:
    """A slot that was saved, and restored by another process."""
    command = [server, "--model", str(file), "--host", LOCAL, "--parallel", "1"]
    command += ["--ctx-size", str(len(ids) + 256), "--threads", str(threads)]
    command += ["--threads-batch", str(threads), "--slot-save-path", f"{folder}/", "--log-disable"]
    body = {"prompt": ids, "n_predict": 1, "temperature": 0.0, "cache_prompt": True, "id_slot": 0}
    with PeerProcess(command) as process:
        start = time.perf_counter()
        answer = post(process.url, "/completion", body)
        read = time.perf_counter() - start
        post(process.url, "/slots/0?action=save", {"filename": SLOT})
    body["prompt"] = [*ids, answer["tokens"][0] if answer.get("tokens") else 300]
    with PeerProcess(command) as process:
        warm = {**body, "prompt": [300, 301]}
        post(process.url, "/completion", warm)
        start = time.perf_counter()
        post(process.url, "/slots/0?action=restore", {"filename": SLOT})
        restored = time.perf_counter() - start
        again = post(process.url, "/completion", body)
        first = time.perf_counter() - start
    return {
        "read_s": round(read, 2),
        "restore_s": round(restored, 4),
        "first_token_s": round(first, 4),
        "tokens_read_again": again["timings"]["prompt_n"],
    }


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON answer, which must be a success."""
    answer = httpx.post(f"{url}{path}", json=body, timeout=TIMEOUT_S, trust_env=False)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def main() -> None:
    """Measures, and writes the result after each length."""
    exit_on_sigterm()
    parser = command_line(__doc__, RESTORE)
    parser.add_argument("--llama-server", default="llama-server", help="path of the binary")
    parser.add_argument("--size", choices=CONFIGS, default="0.1B")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--models", type=Path, help="folder to keep the files in between runs")
    options = parser.parse_args()
    result = Result("checkpoints.restore", options.output)
    figures: Figures = {"size": options.size, "threads": options.threads, "lengths": []}
    with tempfile.TemporaryDirectory() as folder:
        file = file_of(options.models or Path(folder), options.size, "int8")
        for length in options.tokens:
            ids = np.random.default_rng(0).integers(300, 60_000, length).tolist()
            with tempfile.TemporaryDirectory(dir=folder) as inner:
                row = {
                    "tokens": length,
                    "everstream": ours(file, ids, options.threads, Path(inner)),
                    "llama-server": llama(
                        options.llama_server, file, ids, options.threads, Path(inner)
                    ),
                }
            figures["lengths"].append(row)
            result.save(figures)
    result.finish(figures)


if __name__ == "__main__":
    main()
