"""A package index on loopback with one wheel, which it can cut off or hold back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Index:
    """``num_sent`` counts requests for the wheel; of ``cut`` each gets half of it."""

    wheel: Path
    url: str = ""
    cut: bool = False
    num_sent: int = 0
    #: Set by a request for the wheel, which is answered when ``may_send`` is.
    asked: threading.Event = field(default_factory=threading.Event)
    may_send: threading.Event = field(default_factory=threading.Event)


@contextmanager
def index_server(wheel: Path) -> Iterator[Index]:
    """The server, while the block runs."""
    index = Index(wheel)
    index.may_send.set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith(index.wheel.suffix):
                self._send_wheel()
            else:
                page = f'<a href="/files/{index.wheel.name}">{index.wheel.name}</a>'.encode()
                self._head(len(page), "text/html")
                self.wfile.write(page)

        def _send_wheel(self) -> None:
            index.num_sent += 1
            index.asked.set()
            index.may_send.wait()
            data = index.wheel.read_bytes()
            self._head(len(data), "application/octet-stream")
            self.wfile.write(data[: len(data) // 2] if index.cut else data)

        def _head(self, num_bytes: int, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(num_bytes))
            self.send_header("Content-Type", kind)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index.url = f"http://127.0.0.1:{server.server_port}/simple"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield index
    finally:
        index.may_send.set()
        server.shutdown()
        thread.join()
        server.server_close()
