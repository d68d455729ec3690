"""A model hub on loopback: the part of the protocol that downloads use.

Model info with sizes and digests, trees, and files by HEAD and GET from a byte on. Large files are
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
#: The query of a redirect of a GET.
BEGINNING = "beginning"


class Asked(NamedTuple):
    """A request: ``start`` is the first byte of a range.

    A large file is asked for at the hub by who reads its beginning; a download has asked by HEAD
    where it is, and goes there.
    """

    origin: str
    method: str
    path: str
    start: int
    token: str | None
    is_beginning: bool = False


@dataclass
class Repository:
    """A repository of one commit, called ``main`` and ``v1``.

    ``wrong`` are files whose second half is not what the hub states. The first downloads of one in
    ``broken`` end after so many bytes, or are refused for 0. ``stated`` replaces sizes and digests
    of LFS files in the listing. No file is sent before ``num_readers`` have listed it. ``etags``
    and ``commits`` replace those in the answers for a file.
    """

    files: dict[str, bytes]
    gated: bool = False
    wrong: set[str] = field(default_factory=set)
    broken: dict[str, list[int]] = field(default_factory=dict)
    stated: dict[str, dict[str, object]] = field(default_factory=dict)
    num_readers: int = 1
    etags: dict[str, str] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)

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
        """The same, and remembers. Beginnings are left out."""
        asked = [each for each in self.asked if each.method == "GET" and not each.is_beginning]
        sent = [(each.path, each.start) for each in asked]
        files = {path for repository in self.repositories.values() for path in repository.files}
        return [(path, start) for path, start in dict.fromkeys(sent) if path in files]

    def beginnings(self) -> list[str]:
        """The files whose beginning was read."""
        return [each.path for each in self.asked if each.is_beginning and each.origin == "hub"]

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
            name, what = "/".join(parts[2:4]), parts[4:5]
            if what == ["tree"]:
                self._tree(name, parts[5], "".join(parts[6:7]))
            else:
                self._info(name, parts[5] if what == ["revision"] else "main")
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

    def _tree(self, name: str, revision: str, folder: str) -> None:
        self._record(self.path, 0)
        repository = self._find(name, revision)
        if repository is None:
            return
        is_recursive = "recursive=true" in self.path.lower()
        body = json.dumps(_tree_of(repository, folder, is_recursive)).encode()
        self._send(HTTPStatus.OK, body, {"Content-Type": "application/json"})

    def _file(self, name: str, revision: str, path: str) -> None:
        start = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
        repository = self._find(name, revision)
        is_large = repository is not None and len(repository.files.get(path, b"")) >= LFS_BYTES
        is_beginning = urlsplit(self.path).query == BEGINNING
        if is_large and self.server.origin == "hub" and self.command == "GET":
            is_beginning = True
        self._record(path, start, is_beginning)
        if repository is None:
            return
        if repository.gated and self._token() != TOKEN and self.server.origin == "hub":
            self._refuse(HTTPStatus.UNAUTHORIZED, "GatedRepo")
            return
        if path not in repository.files:
            self._refuse(HTTPStatus.NOT_FOUND, "EntryNotFound")
            return
        data, etag = repository.files[path], repository.etags.get(path, repository.etag(path))
        commit = repository.commits.get(path, repository.commit)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
        if len(data) >= LFS_BYTES and self.server.origin == "hub":
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
            query = f"?{BEGINNING}" if is_beginning else ""
            headers["Location"] = f"{self.server.hub.storage_url}{self.path}{query}"
            self._send(HTTPStatus.FOUND, b"", headers)
            return
        repository.was_listed.wait()
        if path in repository.wrong:
            middle = len(data) // 2  # a header comes whole
            data = data[:middle] + bytes(len(data) - middle)
        if start > 0:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        status = HTTPStatus.PARTIAL_CONTENT if start > 0 else HTTPStatus.OK
        limit = None if is_beginning else self._limit(repository, path)
        self._send(status, data[start:], headers, limit)

    def _limit(self, repository: Repository, path: str) -> int | None:
        """How many bytes this answer has before the connection breaks."""
        limits = repository.broken.get(path)
        return limits.pop(0) if limits else None

    def _find(self, name: str, revision: str) -> Repository | None:
        repository = self.server.hub.repositories.get(name)
        if repository is None:
            self._refuse(HTTPStatus.UNAUTHORIZED, "RepoNotFound")
        elif revision not in ("main", "v1", repository.commit):
            self._refuse(HTTPStatus.NOT_FOUND, "RevisionNotFound")
            return None
        return repository

    def _record(self, path: str, start: int, is_beginning: bool = False) -> None:
        asked = Asked(self.server.origin, self.command, path, start, self._token(), is_beginning)
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


def _tree_of(repository: Repository, folder: str, is_recursive: bool) -> list[dict[str, object]]:
    """The files below a folder, or those in it and its folders, as the hub lists them."""
    entries: dict[str, dict[str, object]] = {}
    start = f"{folder}/" if folder else ""
    for path in repository.files:
        inside = path.removeprefix(start)
        if not path.startswith(start):
            continue
        if "/" in inside and not is_recursive:
            below = start + inside.partition("/")[0]
            entries[below] = {"type": "directory", "path": below, "oid": "0" * 40, "size": 0}
            continue
        found = _sibling(repository, path)
        entries[path] = {
            "type": "file",
            "path": path,
            "size": found["size"],
            "oid": found["blobId"],
        }
        if isinstance(lfs := found.get("lfs"), dict):
            entries[path]["lfs"] = {**lfs, "oid": lfs["sha256"]}
    return list(entries.values())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
