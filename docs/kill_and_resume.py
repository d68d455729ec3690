"""Draws docs/images/kill-and-resume.svg: a stream whose server is killed with ``kill -9`` half way.

    python -m docs.kill_and_resume FILE.svg [--max-tokens N] [--kill-at N] [--seed N]

What the picture shows has happened: a server on a real port with a store in a temporary folder, the
Python client that reads from it, SIGKILL, the same command again, and the rest of the stream. At
the end the text is compared with that of a server that was not killed. Exits 1 where they differ.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from clients.python import Client, Token
from tests.reserved_port import ReservedPort

PROMPT = "Once upon a time"
WIDTH = 92
#: As rich writes it, without the fonts that it would fetch from elsewhere.
SVG = """<svg class="{unique_id}" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g>
</svg>
"""


def start(port: int, store: Path) -> subprocess.Popen[str]:
    """A server of the bundled model that has printed its address."""
    command = [sys.executable, "-m", "server.cli.main", "serve", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--store", str(store)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if f":{port}/" in line:
            return process
    raise SystemExit("the server did not start")


@contextmanager
def serving(port: int, store: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Servers one after another on ``port``; the list has them all, and what is left is ended."""
    processes = [start(port, store)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def record(options: argparse.Namespace, console: Console) -> bool:
    """Prints what happens; returns whether nothing was lost or changed."""
    sampling = {"max_tokens": options.max_tokens, "seed": options.seed}
    with (
        tempfile.TemporaryDirectory() as folder,
        ReservedPort() as port,
        serving(port.number, Path(folder)) as processes,
        Client(f"http://127.0.0.1:{port.number}") as client,
    ):
        before, after, seqs = "", "", list[int]()
        for event in client.create_session().generate(PROMPT, **sampling):
            if not isinstance(event, Token):
                after += event.text
                continue
            seqs.append(event.seq)
            if event.seq <= options.kill_at:
                before += event.text
            else:
                after += event.text
            if event.seq == options.kill_at:
                os.kill(processes[0].pid, signal.SIGKILL)
                processes[0].wait()
                killed_s = time.monotonic()
                processes.append(start(port.number, Path(folder)))
            elif event.seq == options.kill_at + 1:
                pause_s = time.monotonic() - killed_s
        undisturbed = client.create_session().generate(PROMPT, **sampling).text()
    complete = seqs == list(range(1, options.max_tokens + 1))
    same = before + after == undisturbed
    shown = Text.assemble(
        (PROMPT, "bold cyan"), before, ("█", "red"), (after, "green"), "\n\n",
        (f"token {options.kill_at}", "bold"), ": ", ("kill -9", "bold red"), " of the server\n",
        (f"token {options.kill_at + 1}", "bold"), f": {pause_s:.2f} s later, by the new process\n",
        (f"seq 1 to {options.max_tokens}", "bold"),
        ": ", "each once, in order" if complete else "WITH GAPS", "\n",
        ("text", "bold"), ": ", "the same" if same else "NOT the same",
        " as that of a server that was not killed",
    )  # fmt: skip
    console.print(Padding(shown, (1, 2)))
    return complete and same


def main() -> int:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--kill-at", type=int, default=80)
    parser.add_argument("--seed", type=int, default=12)
    options = parser.parse_args()
    console = Console(record=True, width=WIDTH, file=sys.stderr)
    kept = record(options, console)
    title = "a stream, kill -9, and the rest of the stream"
    options.file.write_text(console.export_svg(title=title, code_format=SVG), encoding="utf-8")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
