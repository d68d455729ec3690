"""A real Chromium on a real server process, whose engine is the fake one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, WebSocket, expect, sync_playwright
from playwright.sync_api import Error as PlaywrightError

from docs.screenshot import CHROMIUM, CHROMIUM_ARGS
from model.bundled_models import DEFAULT_MODEL
from model.tokenizer import Tokenizer
from tests.browser.reading import open_page
from tests.reliability.servers import FAKE, ServerProcess

StartServer = Callable[..., ServerProcess]

#: After so long a page is stuck. A busy machine may take many seconds to show something.
STUCK_MS = 120_000


@pytest.fixture(scope="module")
def start_server() -> Iterator[StartServer]:
    """Starts servers that end with the module; settings are those of the environment."""
    with ExitStack() as stack:

        def start(port: int = 0, step_ms: float = 2.0, **settings: str) -> ServerProcess:
            # The pages of a module's tests leave their sessions, as pages do that are closed.
            settings.setdefault("max_sessions", "256")
            environment = {f"EVERSTREAM_{name.upper()}": v for name, v in settings.items()}
            server = ServerProcess(
                "--step-ms", step_ms, program=FAKE, environment=environment, port=port
            )
            return stack.enter_context(server)

        yield start


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
    with ExitStack() as stack:

        def start(*flags: str, port: int = 0) -> ServerProcess:
            return stack.enter_context(ServerProcess(*flags, port=port))

        yield start


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> ServerProcess:
    """One server for the tests that leave it whole."""
    return start_server()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=STUCK_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=CHROMIUM_ARGS, timeout=STUCK_MS
        )
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

    def report(self) -> str:
        """What the page shows now, what it complained about, and the last frames of its sockets."""
        frames = [("sent", frame) for frame in self.sent[-10:]]
        frames += [("received", frame) for frame in self.received[-10:]]
        return "\n".join(
            [
                self.page.locator("body").inner_text(timeout=5000),
                *self.complaints,
                *self.exceptions,
                *(f"{way}: {json.dumps(frame)[:300]}" for way, frame in frames),
            ]
        )

    def watch_socket(self, stream: WebSocket) -> None:
        self.urls.append(stream.url)
        stream.on("framesent", lambda frame: self.sent.append(json.loads(frame)))
        stream.on("framereceived", lambda frame: self.received.append(json.loads(frame)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows its page."""
    report = yield
    visit = item.funcargs.get("visit")
    if report.when == "call" and report.failed and isinstance(visit, Visit):
        try:
            report.sections.append(("page", visit.report()))
        except PlaywrightError as error:
            report.sections.append(("page", f"cannot be shown: {error}"))
    return report


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """A fresh page at desktop size. No test may leave an uncaught exception behind."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    context.set_default_timeout(STUCK_MS)
    page = context.new_page()
    visit = Visit(page)
    page.on("request", lambda request: visit.urls.append(request.url))
    page.on("websocket", visit.watch_socket)
    page.on("console", lambda message: visit.complaints.append(message.text))
    page.on("pageerror", lambda error: visit.exceptions.append(str(error)))
    yield visit
    context.close()
    assert visit.exceptions == []


@pytest.fixture
def page(visit: Visit, server: ServerProcess) -> Page:
    """The page of `server`, connected."""
    open_page(visit.page, server)
    return visit.page
