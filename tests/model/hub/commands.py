"""Commands of ``everstream`` in one other process, whose environment names a hub and a cache.

The hub's library reads its settings when it is imported, so they cannot change in this process,
and a process for each command would take most of the tests' time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    status: int
    stdout: str
    stderr: str


class Commands:
    """The other process. One command at a time."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests, self._answers = requests, answers

    def run(self, *words: str, **variables: str) -> Done:
        """Runs ``everstream WORDS``; ``variables`` are set for this command."""
        self._requests.write(json.dumps([words, variables]) + "\n")
        self._requests.flush()
        return Done(**json.loads(self._answers.readline()))

    def pull(self, *words: str, **variables: str) -> Path:
        """Where ``everstream pull WORDS`` has put the model."""
        done = self.run("pull", *words, **variables)
        assert done.status == 0, done.stderr
        return Path(done.stdout.strip())

    def refused(self, *words: str, **variables: str) -> str:
        """The message of a command that fails as it should."""
        done = self.run(*words, **variables)
        assert done.status == 2, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done.stderr.rpartition("everstream: ")[2].strip()


@contextmanager
def commands(environment: Mapping[str, str], tree: Path = ROOT) -> Iterator[Commands]:
    """The process, while the block runs, with the code of ``tree``."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.model.hub.commands"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tree,
        env={**os.environ, **environment},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Commands(process.stdin, process.stdout)
        process.stdin.close()


def main() -> None:
    """Reads a command per line of stdin, and writes a line for each to stdout."""
    import huggingface_hub.utils  # its log goes to the stderr of now, not to a command's
    from typer.testing import CliRunner

    from server.cli.main import app

    assert huggingface_hub.utils.logging.get_logger().handlers
    for line in sys.stdin:
        words, variables = json.loads(line)
        result = CliRunner().invoke(app, words, env=variables)
        stderr = result.stderr
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            stderr += "".join(traceback.format_exception(result.exception))
        answer = {"status": result.exit_code, "stdout": result.stdout, "stderr": stderr}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
