"""A real Chromium on a real server process, whose engine is the fake one."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, WebSocket, sync_playwright

from docs.screenshot import CHROMIUM, CHROMIUM_ARGS
from model.bundled_models import DEFAULT_MODEL
from model.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent.parent


@dataclass(eq=False)
class ServerProcess:
    """A running server; ``kill`` ends it as a crash would."""

    process: subprocess.Popen[str]
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


StartServer = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def start_server() -> Iterator[StartServer]:
    """Starts servers that end with the module; settings are those of the environment."""
    started: list[ServerProcess] = []

    def start(port: int = 0, step_ms: float = 2.0, **settings: str) -> ServerProcess:
        # The pages of a module's tests leave their sessions, as pages do that are closed.
        settings.setdefault("max_sessions", "256")
        environment = os.environ | {f"EVERSTREAM_{k.upper()}": v for k, v in settings.items()}
        options = ["--port", str(port), "--step-ms", str(step_ms)]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fake_server", *options],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        # Printed once the socket listens: from then on a connection waits instead of failing.
        server = ServerProcess(process)
        started.append(server)
        line = process.stdout.readline()
        assert line.startswith("port "), f"the server did not start: {line!r}"
        server.port = int(line.split()[1])
        return server

    yield start
    for server in started:
        if server.process.returncode is None:
            server.kill()


@pytest.fixture
def endless_model(tmp_path: Path) -> Path:
    """The bundled model with an end of text that it never writes: the byte 0."""
    folder = tmp_path / "endless"
    shutil.copytree(DEFAULT_MODEL, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["eos_token_id"] = Tokenizer.load(folder / "tokenizer.json").encode("\0")[0]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def start_real() -> Iterator[StartServer]:
    """Starts servers of the real model, with flags of the command."""
    started: list[ServerProcess] = []

    def start(*flags: str, port: int = 0) -> ServerProcess:
        port = port or free_port()
        process = subprocess.Popen(
            [sys.executable, "-m", "server.cli.main", "serve", "--port", str(port), *flags],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        server = ServerProcess(process, port)
        started.append(server)
        assert process.stdout is not None
        for line in process.stdout:
            if server.url in line:
                return server
        raise AssertionError("the server did not start")

    yield start
    for server in started:
        if server.process.returncode is None:
            server.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> ServerProcess:
    """One server for the tests that leave it whole."""
    return start_server()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@dataclass(eq=False)
class Visit:
    """A page, all that it asked for and complained about, and what its sockets carried."""

    page: Page
    sent: list[dict[str, Any]] = field(default_factory=list)
    received: list[dict[str, Any]] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    exceptions: list[str] = field(default_factory=list)

    def messages(self, type: str) -> list[dict[str, Any]]:
        """The messages of one type that came from the server."""
        return [message for message in self.received if message["type"] == type]

    def watch_socket(self, stream: WebSocket) -> None:
        self.urls.append(stream.url)
        stream.on("framesent", lambda frame: self.sent.append(json.loads(frame)))
        stream.on("framereceived", lambda frame: self.received.append(json.loads(frame)))


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """A fresh page at desktop size. No test may leave an uncaught exception behind."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    page = context.new_page()
    visit = Visit(page)
    page.on("request", lambda request: visit.urls.append(request.url))
    page.on("websocket", visit.watch_socket)
    page.on("console", lambda message: visit.complaints.append(message.text))
    page.on("pageerror", lambda error: visit.exceptions.append(str(error)))
    yield visit
    context.close()
    assert visit.exceptions == []
