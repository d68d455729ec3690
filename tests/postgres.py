"""A real PostgreSQL of a test's own, from Debian's package: started, stopped, paused and killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.reserved_port import ReservedPort
from tests.stopping import stop

USER = "everstream"
#: Tests that are killed leave no server behind.
DIES_WITH_US = ("setpriv", "--pdeathsig=INT")
#: After so long it is stuck.
STUCK_S = 120.0


def binaries() -> Path | None:
    """The folder of the newest PostgreSQL that is installed."""
    folders = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name)
    )
    if folders:
        return folders[-1]
    found = shutil.which("postgres")
    return Path(found).parent if found else None


class Postgres:
    """One server with a data directory of its own, on a port of 127.0.0.1.

    It refuses to run as root, so that root's tests run it as the user ``postgres``.
    """

    def __init__(self, *, fsync: bool = False) -> None:
        bin_dir = binaries()
        assert bin_dir is not None, (
            "PostgreSQL is not installed (Debian: apt-get install postgresql)"
        )
        self._bin = bin_dir
        self._as_user = [*DIES_WITH_US] if shutil.which("setpriv") else []
        self._dir = Path(tempfile.mkdtemp(prefix="everstream-postgres-"))
        if os.geteuid() == 0:
            shutil.chown(self._dir, "postgres", "postgres")
            self._as_user += ["--reuid=postgres", "--regid=postgres", "--clear-groups"]
        self._data = self._dir / "data"
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        self._process: subprocess.Popen[bytes] | None = None
        self._num_databases = 0
        options = ["-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C"]
        self._run("initdb", "-D", self._data, "-U", USER, *options)
        with (self._data / "postgresql.conf").open("a") as config:
            config.write(
                f"listen_addresses = '127.0.0.1'\nport = {self.port}\n"
                f"unix_socket_directories = '{self._dir}'\nfsync = {'on' if fsync else 'off'}\n"
                "max_connections = 200\nshared_buffers = 64MB\nlogging_collector = off\n"
            )

    def start(self) -> None:
        """Returns when it takes connections. Raises `RuntimeError` with its log if it ends."""
        log = (self._dir / "log").open("ab")
        command = [*self._as_user, self._bin / "postgres", "-D", self._data]
        self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._dir)
        log.close()
        until_s = time.monotonic() + STUCK_S
        while not self._takes_connections():
            if self._process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"PostgreSQL did not start:\n{self._log()}")

    def stop(self) -> None:
        """Ends it at once, as an administrator would who is in a hurry; its data stay."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(STUCK_S)
            self._process = None

    def kill(self) -> None:
        """Ends it as a crash would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(STUCK_S)
        self._process = None

    def pause(self) -> None:
        """Neither it nor any of its children does anything until `go_on`."""
        for pid in self._pids():
            stop(pid)

    def go_on(self) -> None:
        for pid in reversed(self._pids()):
            with suppress(ProcessLookupError):  # a child may end at any time
                os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None:
            self.go_on()
            self.kill()
        self._reserved.close()
        shutil.rmtree(self._dir, ignore_errors=True)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """The URL of an empty database."""
        self._num_databases += 1
        name = f"test_{self._num_databases}"
        self.psql(f"CREATE DATABASE {name} STRATEGY wal_log")
        return self.url(name)

    def psql(self, command: str, database: str = "postgres") -> str:
        """What ``command`` prints, without decoration."""
        options = ["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1"]
        return self._run("psql", *options, "-c", command, self.url(database))

    def _pids(self) -> list[int]:
        """The server first, then its children."""
        assert self._process is not None
        parent = self._process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return [parent, *map(int, children)]

    def _takes_connections(self) -> bool:
        options = ["-h", "127.0.0.1", "-p", self.port, "-t", "1"]
        return self._done("pg_isready", *options).returncode == 0

    def _run(self, program: str, *arguments: object) -> str:
        done = self._done(program, *arguments)
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stdout}{done.stderr}\n{self._log()}")
        return done.stdout

    def _done(self, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(part) for part in (*self._as_user, self._bin / program, *arguments)]
        return subprocess.run(
            command, cwd=self._dir, capture_output=True, text=True, check=False, timeout=STUCK_S
        )

    def _log(self) -> str:
        path = self._dir / "log"
        return path.read_text()[-2000:] if path.is_file() else ""
