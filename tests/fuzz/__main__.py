"""``python -m tests.fuzz --minutes M --seed N``: exit code 1 where a file has fallen.

``--format F --seed N --minutes 0`` tries one file again, and leaves it in ``--keep FOLDER``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.files import FORMATS, Format
from tests.fuzz.run import Fuzz, run, seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first file of each format")
    parser.add_argument("--format", choices=[each.name for each in FORMATS])
    parser.add_argument("--keep", type=Path, help="new folder for all files and the last changed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(exist_ok=True)
        fuzz = Fuzz(folder)
        with fuzz.child:
            cases = seeds(options.seed, 1 << 40 if options.minutes else 1)
            end = time.monotonic() + 60 * options.minutes
            verdict = run(fuzz, _until(end, cases, options), lambda line: print(line, flush=True))
    for name, count in sorted(verdict.counts.items()):
        print(f"{count:8,}  {name}")
    return 1 if verdict.fallen else 0


def _until(
    end: float, cases: Iterator[tuple[Format, int]], options: argparse.Namespace
) -> Iterator[tuple[Format, int]]:
    for format, seed in cases:
        if options.minutes and time.monotonic() > end:
            return
        if options.format in (None, format.name):
            yield format, seed


if __name__ == "__main__":
    raise SystemExit(main())
