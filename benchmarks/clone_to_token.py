"""Seconds from `git clone` to the first token of `make serve`, as a newcomer has it.

A clone of this tree's last commit in a folder of its own, without pip's cache of packages. Shown
are the seconds to the server's address and to the first token, the longest silence of the terminal
between them, and the processor time of all. The terminal is a pipe, which shows least.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.cold_start import first_token
from benchmarks.process import ROOT
from benchmarks.report import Figures, Result, command_line, show_figures

ADDRESS = re.compile(r"Open http://127\.0\.0\.1:(\d+)/")


def measured(folder: Path) -> Figures:
    """Clones into ``folder``, serves there on a free port, and stops the server."""
    environment = os.environ | {
        "PIP_NO_CACHE_DIR": "1",
        "PYTHONUNBUFFERED": "1",
        "XDG_STATE_HOME": str(folder / "state"),
    }
    start = last = time.perf_counter()
    subprocess.run(["git", "clone", "--quiet", ROOT, folder / "clone"], check=True)
    command = ["make", "serve", "ARGS=--port 0"]
    with subprocess.Popen(
        command,
        cwd=folder / "clone",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as serving:
        assert serving.stdout is not None
        silence_s, found = 0.0, None
        while found is None:
            line = serving.stdout.readline()
            if not line:
                raise SystemExit("`make serve` has ended")
            now = time.perf_counter()
            silence_s, last = max(silence_s, now - last), now
            print(f"{now - start:6.1f} {line}", end="", file=sys.stderr)
            found = ADDRESS.search(line)
        first_token(int(found[1]))
        token_s = time.perf_counter() - start
        os.killpg(serving.pid, signal.SIGINT)
        serving.stdout.read()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "serving_s": last - start,
        "first_token_s": token_s,
        "longest_silence_s": silence_s,
        "processor_s": used.ru_utime + used.ru_stime,
    }


def main() -> None:
    """Measures, prints, and ends with the line of JSON."""
    options = command_line(__doc__).parse_args()
    result = Result("clone_to_token", options.output)
    with tempfile.TemporaryDirectory() as folder:
        figures = measured(Path(folder))
    show_figures("From clone to first token", figures)
    result.finish(figures)


if __name__ == "__main__":
    main()
