"""What a server reads again of a long text: Everstream, and llama.cpp's server with saved slots.

    python -m benchmarks.checkpoints.edited FILE

Both read the same random ids from the same GGUF file. Then one more token is asked for, and one
after the last `EDITED` ids were replaced; and both again by another process, in which the session
was kept, or the slot restored. The seconds are those until the token; those of starts do not count.
llama.cpp's server is that of `xllamacpp`, which says how many tokens it has read.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoints.restore import TIMEOUT_S, post
from benchmarks.process import ROOT, ServerProcess, exit_on_sigterm
from benchmarks.report import RESULTS, Figures, Result, command_line
from clients.python import Client, Session

RESULT = RESULTS / "checkpoint_edited.json"
#: Ids at the end that are replaced by others.
EDITED = 16
#: Ids of one request of ours: all of them, and a part.
WHOLE, PART = 1 << 20, 512
SLOT = "slot.bin"


def ours(
    options: Any, ids: list[int], other: list[int], folder: Path, part: int = WHOLE
) -> Figures:
    """A kept session that reads ``part`` ids at a time; an edit is a rewind, and the other ids."""
    flags = ["--model", str(options.file), "--dtype", options.dtype]
    flags += ["--threads", str(options.threads), "--store", str(folder / "store")]
    flags += ["--max-sessions", "2"]
    if options.context:
        flags += ["--context", str(options.context)]

    def edited(session: Session) -> float:
        start = time.perf_counter()
        session.rewind(len(ids) - EDITED)
        session.append(other)
        _one_token(session)
        return time.perf_counter() - start

    found: Figures = {}
    with ServerProcess(*flags) as server, Client(server.url, timeout_s=TIMEOUT_S) as client:
        session = client.create_session()
        start = time.perf_counter()
        for begin in range(0, len(ids), part):
            session.append(ids[begin : begin + part])
        found["read_s"] = time.perf_counter() - start
        found["continued_s"] = _one_token(session)
        found["edited_s"] = edited(session)
        server.stop()
    with ServerProcess(*flags) as server, Client(server.url, timeout_s=TIMEOUT_S) as client:
        first = client.create_session()  # the first request of a process is slower
        first.append(ids[:2])
        _one_token(first)
        session = client.session(session.id)
        found["restored_continued_s"] = _one_token(session)
        found["restored_edited_s"] = edited(session)
    return {name: round(seconds, 4) for name, seconds in found.items()}


def _one_token(session: Session) -> float:
    start = time.perf_counter()
    session.generate(max_tokens=1, temperature=0.0, ignore_eos=True).text()
    return time.perf_counter() - start


def llama(options: Any, ids: list[int], other: list[int], folder: Path) -> Figures:
    """A slot with its prompt cache, saved and restored."""
    context = options.context or len(ids) + 256
    continued, edited = [*ids, other[0]], [*ids[:-EDITED], *other]
    found: Figures = {}

    def ask(url: str, name: str, prompt: list[int]) -> None:
        body = {"prompt": prompt, "n_predict": 1, "cache_prompt": True, "id_slot": 0}
        start = time.perf_counter()
        answer = post(url, "/completion", body)
        found[f"{name}_s"] = round(time.perf_counter() - start, 4)
        found[f"{name}_tokens"] = answer["timings"]["prompt_n"]

    with llama_server(options, folder, context) as url:
        ask(url, "read", ids)
        post(url, "/slots/0?action=save", {"filename": SLOT})
        ask(url, "continued", continued)
        ask(url, "edited", edited)
    for name, prompt in (("restored_continued", continued), ("restored_edited", edited)):
        with llama_server(options, folder, context) as url:
            ask(url, "warm", [300, 301])
            post(url, "/slots/0?action=restore", {"filename": SLOT})
            ask(url, name, prompt)
    del found["warm_s"], found["warm_tokens"], found["read_tokens"]
    return found


@contextmanager
def llama_server(options: Any, folder: Path, context: int) -> Iterator[str]:
    """The address of llama.cpp's server in a process of its own."""
    script = ROOT / "benchmarks" / "checkpoints" / "llama_server.py"
    words = [options.file, folder, options.threads, context]
    with subprocess.Popen(
        [sys.executable, str(script), *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield next(line.strip() for line in process.stdout if line.startswith("http"))
        finally:
            process.kill()


def main() -> None:
    """Measures, and writes the result after each length."""
    exit_on_sigterm()
    parser = command_line(__doc__, RESULT)
    parser.add_argument("file", type=Path, help="GGUF file")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000, 8000])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, help="for models with attention layers")
    options = parser.parse_args()
    result = Result("checkpoints.edited", options.output)
    figures: Figures = {"file": options.file.name, "threads": options.threads, "lengths": []}
    for length in options.tokens:
        chance = np.random.default_rng(0)
        ids = chance.integers(300, 40_000, length).tolist()
        other = chance.integers(300, 40_000, EDITED).tolist()
        row: Figures = {"tokens": length}
        in_parts = partial(ours, part=PART)
        for name, run in (("everstream", ours), ("in parts", in_parts), ("llama.cpp", llama)):
            with tempfile.TemporaryDirectory() as folder:
                row[name] = run(options, ids, other, Path(folder))
        figures["lengths"].append(row)
        result.save(figures)
    result.finish(figures)


if __name__ == "__main__":
    main()
