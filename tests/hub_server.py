"""A model hub on loopback: the part of the protocol that downloads use.

Model info with sizes and digests, and files by HEAD and GET with ranges. Large files are
redirected to a second origin, as the hub's are to its storage. Every request is recorded.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

#: Files of at least so many bytes are LFS files.
LFS_BYTES = 4096
TOKEN = "hf_token_of_a_test"


class Asked(NamedTuple):
    """A request: ``start`` is the first byte of a range, ``stop`` the one behind it if stated."""

    origin: str
    method: str
    path: str
    start: int
    token: str | None
    stop: int | None = None


@dataclass
class Repository:
    """A repository of one commit, called ``main`` and ``v1``.

    ``wrong`` are files whose second half is not what the hub states. A GET of one in ``broken``
    ends after so many bytes, and all further ones are refused. ``stated`` replaces sizes and
    digests of LFS files in the listing. No file is sent before ``num_readers`` have listed it.
    With ``ignores_ranges`` every answer is the whole file.
    """

    files: dict[str, bytes]
    gated: bool = False
    wrong: set[str] = field(default_factory=set)
    broken: dict[str, int] = field(default_factory=dict)
    stated: dict[str, dict[str, object]] = field(default_factory=dict)
    num_readers: int = 1
    ignores_ranges: bool = False

    def __post_init__(self) -> None:
        self.was_listed = threading.Event()
        self._lock = threading.Lock()

    def listing(self) -> list[dict[str, object]]:
        """The files as model info describes them, for one more reader."""
        with self._lock:
            self.num_readers -= 1
            if self.num_readers <= 0:
                self.was_listed.set()
        return [_sibling(self, path) for path in self.files]

    @property
    def commit(self) -> str:
        content = [(path, _sha256(data)) for path, data in sorted(self.files.items())]
        return hashlib.sha1(json.dumps(content).encode()).hexdigest()

    def etag(self, path: str) -> str:
        data = self.files[path]
        return _sha256(data) if len(data) >= LFS_BYTES else _git_sha1(data)


class Hub:
    """The repositories by name, and what was asked."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[Asked] = []
        #: How much was sent of each file whose reader has left before its end.
        self.cut: SimpleQueue[int] = SimpleQueue()
        self._api = _Server(self, "hub")
        self._storage = _Server(self, "storage")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._api.server_port}"

    @property
    def storage_url(self) -> str:
        return f"http://127.0.0.1:{self._storage.server_port}"

    def add(self, name: str, folder: Path, **options: bool) -> Repository:
        """A repository of the files in ``folder``."""
        paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        return self.repositories.setdefault(name, Repository(files, **options))

    def environment(self, cache: Path) -> dict[str, str]:
        """Variables of a process that uses this hub, with an empty cache of its own."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_CACHE": str(cache / "hub"),
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def gets(self) -> list[tuple[str, int]]:
        """Path and first byte of each file that was sent, and forgets what was asked."""
        sent = self.gets_so_far()
        self.asked.clear()
        return sent

    def gets_so_far(self) -> list[tuple[str, int]]:
        """The same, and remembers. Ranges with an end are left out: `beginnings` has them."""
        asked = [each for each in self.asked if each.method == "GET" and each.stop is None]
        sent = [(each.path, each.start) for each in asked]
        files = {path for repository in self.repositories.values() for path in repository.files}
        return [(path, start) for path, start in dict.fromkeys(sent) if path in files]

    def beginnings(self) -> list[tuple[str, int, int]]:
        """Path, first byte and the one behind the last, of each range that was asked for."""
        asked = [each for each in self.asked if each.origin == "hub" and each.stop is not None]
        return [(each.path, each.start, each.stop or 0) for each in asked]

    def clear(self) -> None:
        """Forgets the repositories and what was asked."""
        self.repositories.clear()
        self.asked.clear()

    def close(self) -> None:
        for server in (self._api, self._storage):
            server.close()


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub without repositories, while the block runs."""
    hub = Hub()
    try:
        yield hub
    finally:
        hub.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: Hub, origin: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub, self.origin = hub, origin
        self._thread = threading.Thread(target=self.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
        if parts[:2] == ["api", "models"]:
            self._info("/".join(parts[2:4]), parts[5] if parts[4:5] == ["revision"] else "main")
        else:
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _info(self, name: str, revision: str) -> None:
        self._record(self.path, 0)
        if self._token() not in (None, TOKEN):
            said = {"X-Error-Message": "Invalid credentials in Authorization header"}
            self._send(HTTPStatus.UNAUTHORIZED, b"", said)
            return
        repository = self._find(name, revision)
        if repository is None:
            return
        body = {"id": name, "sha": repository.commit, "siblings": repository.listing()}
        self._send(HTTPStatus.OK, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, revision: str, path: str) -> None:
        first, _, last = (self.headers.get("Range") or "bytes=0-")[6:].partition("-")
        start, stop = int(first), int(last) + 1 if last else None
        self._record(path, start, stop)
        repository = self._find(name, revision)
        if repository is None:
            return
        if repository.gated and self._token() != TOKEN and self.server.origin == "hub":
            self._refuse(HTTPStatus.UNAUTHORIZED, "GatedRepo")
            return
        if path not in repository.files:
            self._refuse(HTTPStatus.NOT_FOUND, "EntryNotFound")
            return
        data, etag = repository.files[path], repository.etag(path)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": repository.commit}
        if len(data) >= LFS_BYTES and self.server.origin == "hub":
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
            headers["Location"] = f"{self.server.hub.storage_url}{self.path}"
            self._send(HTTPStatus.FOUND, b"", headers)
            return
        repository.was_listed.wait()
        if path in repository.wrong:
            middle = len(data) // 2  # a header comes whole
            data = data[:middle] + bytes(len(data) - middle)
        if repository.ignores_ranges:
            start, stop = 0, None
        is_part = start > 0 or stop is not None
        if is_part:
            last_byte = len(data) - 1 if stop is None else stop - 1
            headers["Content-Range"] = f"bytes {start}-{last_byte}/{len(data)}"
        status = HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK
        limit = self._limit(repository, path) if stop is None else None
        self._send(status, data[start:stop], headers, limit)

    def _limit(self, repository: Repository, path: str) -> int | None:
        """How many bytes this answer has before the connection breaks."""
        limit = repository.broken.get(path)
        if limit is not None:
            repository.broken[path] = 0
        return limit

    def _find(self, name: str, revision: str) -> Repository | None:
        repository = self.server.hub.repositories.get(name)
        if repository is None:
            self._refuse(HTTPStatus.UNAUTHORIZED, "RepoNotFound")
        elif revision not in ("main", "v1", repository.commit):
            self._refuse(HTTPStatus.NOT_FOUND, "RevisionNotFound")
            return None
        return repository

    def _record(self, path: str, start: int, stop: int | None = None) -> None:
        asked = Asked(self.server.origin, self.command, path, start, self._token(), stop)
        self.server.hub.asked.append(asked)

    def _token(self) -> str | None:
        found = self.headers.get("Authorization")
        return None if found is None else found.removeprefix("Bearer ")

    def _refuse(self, status: HTTPStatus, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code})

    def _send(
        self, status: HTTPStatus, body: bytes, headers: dict[str, str], limit: int | None = None
    ) -> None:
        if limit == 0:
            status, limit, body = HTTPStatus.INSUFFICIENT_STORAGE, None, b""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self._write(body[:limit])
        if limit is not None:
            self.close_connection = True

    def _write(self, body: bytes) -> None:
        sent = 0
        try:
            while sent < len(body):
                sent += self.wfile.write(body[sent : sent + (1 << 16)])
        except OSError:
            self.server.hub.cut.put(sent)
            self.close_connection = True


def _sibling(repository: Repository, path: str) -> dict[str, object]:
    """A file as the listing describes it."""
    data = repository.files[path]
    lfs: dict[str, object] = {"size": len(data), "sha256": _sha256(data), "pointerSize": 130}
    lfs |= repository.stated.get(path, {})
    file = {"rfilename": path, "size": lfs["size"], "blobId": _git_sha1(data)}
    return {**file, "lfs": lfs} if len(data) >= LFS_BYTES else file


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
