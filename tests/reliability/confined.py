"""A module's command in namespaces of its own: ``python -m tests.reliability.confined``.

``--tmpfs PATH SIZE MODULE ARGUMENTS``: with a small file system of its own at PATH,
which ends with the process. The process keeps its id. Needs Linux, and a user who
may make namespaces.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOUNT = 'mount -t tmpfs -o size="$2" tmpfs "$1" && shift 2 && exec "$@"'


def unshare(*namespaces: str) -> list[str]:
    """The beginning of a command in namespaces of its own."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *user, *namespaces]


def can(*namespaces: str) -> bool:
    """Whether this machine lets this user have them, and mount something there."""
    command = [*unshare("--mount", *namespaces), "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def inside(pid: int, path: Path) -> Path:
    """``path`` as the process ``pid`` sees it."""
    return Path(f"/proc/{pid}/root") / path.relative_to("/")


@contextmanager
def volume(path: Path, size: str) -> Iterator[tuple[str, ...]]:
    """A small file system at ``path`` for the processes that the yielded command starts.

    It outlasts each of them. Others see it at `inside` of such a process.
    """
    script = 'mount -t tmpfs -o size="$2" tmpfs "$1" && echo mounted && exec cat'
    command = [*unshare("--mount"), "sh", "-c", script, "sh", str(path), size]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"mounted\n"
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        yield ("nsenter", f"--target={holder.pid}", "--mount", *user, f"--wdns={Path.cwd()}")
        holder.stdin.close()  # type: ignore[union-attr]


def main() -> None:
    flag, path, size, *module = sys.argv[1:]
    assert flag == "--tmpfs", flag
    command = [*unshare("--mount"), "sh", "-c", MOUNT, "sh", path, size]
    os.execvp(command[0], [*command, sys.executable, "-m", *module])


if __name__ == "__main__":
    main()
