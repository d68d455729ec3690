"""OpenAI's package for Python."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model.families.rwkv7.chat import THINKING
from model.tokenization.world import PADDED_SIZE, PUBLISHED
from model.tokenizer import Tokenizer
from tests.compat.conftest import serving
from tests.compat.environments import Client, python_client
from tests.docs.blocks import blocks_of
from tests.docs.pages import DOCS
from tests.reliability.proxy import FaultProxy, Link, proxied
from tests.reliability.servers import ServerProcess
from tests.rwkv7 import SHAPES, published, write_pth
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(400)

MOVE = DOCS / "use" / "move-an-application.md"
PAGES = (DOCS.parent / "README.md", DOCS / "start" / "first-chat.md")
#: Of a stream: its first events, and a part of those with text.
BYTES_READ = 10_000


@pytest.fixture(scope="module")
def client() -> Client:
    return python_client("openai")


def test_the_python_package_passes_its_checks(client: Client, environment: dict[str, str]) -> None:
    client.check(timeout_s=300, **environment)


def test_the_python_package_reconnects_after_a_restart(client: Client, tmp_path: Path) -> None:
    with (
        serving(tmp_path) as server,
        client.running("over_a_restart.py", EVERSTREAM_URL=server.url) as lines,
    ):
        assert next(lines) == "ready"
        assert server.stop() == 0
        server.start()
        assert list(lines) == ["closed 1012", "went on"]


def test_the_python_package_gets_separate_thinking(client: Client, tmp_path: Path) -> None:
    """RWKV-7 with the World vocabulary, whose turns and levels are its family's."""
    shape = replace(SHAPES["odd"], vocab_size=PADDED_SIZE)
    model = write_pth(tmp_path / "thinker.pth", published(shape))
    marker = THINKING.close.removesuffix(THINKING.gap)
    num_close = len(Tokenizer.load(PUBLISHED).encode(marker))
    flags = ("--model", f"thinker={model}", "--reasoning", "12")
    with serving(tmp_path, *flags) as server:
        told = {"EVERSTREAM_URL": server.url, "BUDGET": "12", "NUM_CLOSE": str(num_close)}
        client.check("with_thinking.py", **told)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_program_of_the_page_prints_an_answer(
    path: Path, client: Client, tmp_path: Path
) -> None:
    with ServerProcess("--store", tmp_path) as server:
        assert client.run("-c", program_of(path, server.url), timeout_s=60).strip()


def program_of(path: Path, url: str) -> str:
    """The only program of a page, for the server at ``url``."""
    (program,) = re.findall(r"(?ms)^```python\n(.*?)^```", path.read_text("utf-8"))
    assert "http://127.0.0.1:8000" in program
    return str(program.replace("http://127.0.0.1:8000", url))


#: Programs of docs/use/move-an-application.md: for OpenAI, with a key, and with responses.
BEFORE, WITH_A_KEY, WITH_RESPONSES = (
    block.text for block in blocks_of(MOVE) if block.language == "python"
)
SERVE, EXPORT = (block.text for block in blocks_of(MOVE) if block.language == "sh")


def moved(server: ServerProcess) -> dict[str, str]:
    """What the page exports, for this server."""
    words = shlex.split(EXPORT.replace("http://127.0.0.1:8000", server.url))
    assert words.pop(0) == "export"
    return dict(word.split("=", 1) for word in words)


@pytest.fixture
def moved_to(tmp_path: Path) -> Iterator[ServerProcess]:
    """The page's server, with the bundled model in the place of the download."""
    words = shlex.split(SERVE)
    with ServerProcess(*words[words.index("--served-model-name") :], "--store", tmp_path) as server:
        yield server


def kept_sessions(server: ServerProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(server.get("/v1/sessions")[1])["data"]
    return found


@pytest.mark.parametrize(
    ("program", "num_kept"), [(BEFORE, 0), (WITH_A_KEY, 1), (WITH_RESPONSES, 2)]
)
def test_application_for_openai_runs_with_other_settings(
    program: str, num_kept: int, client: Client, moved_to: ServerProcess
) -> None:
    assert client.run("-c", program, timeout_s=60, **moved(moved_to)).strip()
    assert len(kept_sessions(moved_to)) == num_kept


async def test_request_with_a_key_is_answered_once_over_a_kill(
    client: Client, moved_to: ServerProcess
) -> None:
    """A longer answer than the page's, so that the server is killed in the middle of it."""
    program = WITH_A_KEY
    for shown, longer in {
        "max_tokens=60": "max_tokens=3000",
        "extra_headers=": 'extra_body={"ignore_eos": True}, extra_headers=',
    }.items():
        assert program.count(shown) == 1
        program = program.replace(shown, longer)
    running = asyncio.create_task(
        asyncio.to_thread(client.run, "-c", program, timeout_s=300, **moved(moved_to))
    )
    await eventually(lambda: any(one["busy"] for one in kept_sessions(moved_to)))
    await asyncio.to_thread(moved_to.restart)
    printed = await running
    (session,) = kept_sessions(moved_to)
    _, body = moved_to.get(f"/v1/sessions/{session['session']}/text")
    _, written = json.loads(body)["parts"]
    assert written["end"] - written["start"] == 3000
    assert printed == f"{written['text']}\n"


def killed(server: ServerProcess) -> None:
    server.restart()


def stopped(server: ServerProcess) -> None:
    assert server.stop() == 0
    server.start()


def cut_off(server: ServerProcess) -> None:
    """Nothing happens to the server itself."""


@pytest.mark.parametrize("fault", [killed, stopped, cut_off])
async def test_the_program_of_the_page_prints_each_piece_once_over_a_lost_connection(
    fault: Callable[[ServerProcess], None], client: Client, tmp_path: Path
) -> None:
    """The text is longer than the page's, so that most of it comes after the ``fault``.

    A server that is stopped says so in its stream; in the other cases the stream is silent before
    it is reset, so that the client has not read to the end, however fast the server is.
    """
    path = DOCS / "use" / "responses.md"
    async with proxied_server(tmp_path) as (server, proxy):
        program = (
            f"{program_of(path, f'http://127.0.0.1:{proxy.port}')}\nprint(f'\\n{{response.id}}')"
        )
        for shown, longer in {
            "max_output_tokens=400": "max_output_tokens=2000",
            "background=True": "background=True, extra_body={'ignore_eos': True}",
        }.items():
            assert program.count(shown) == 1
            program = program.replace(shown, longer)
        if fault is not stopped:
            proxy.to_client.swallow_after_bytes = BYTES_READ
        running = asyncio.create_task(asyncio.to_thread(client.run, "-c", program, timeout_s=300))
        await eventually(lambda: any(is_read(link) for link in proxy.links))
        proxy.to_client.swallow_after_bytes = None
        num_links = len(proxy.links)
        await asyncio.to_thread(fault, server)
        for link in proxy.links[:num_links]:
            link.cut()
        printed, id = (await running).rstrip("\n").rsplit("\n", 1)
        assert fault is stopped or len(proxy.links) > num_links
        _, body = await asyncio.to_thread(server.get, f"/v1/responses/{id}")
    answer = json.loads(body)
    assert (answer["status"], answer["usage"]["output_tokens"]) == ("incomplete", 2000)
    assert printed == answer["output"][0]["content"][0]["text"]


@asynccontextmanager
async def proxied_server(store: Path) -> AsyncIterator[tuple[ServerProcess, FaultProxy]]:
    with ServerProcess("--store", store) as server:
        async with proxied(server.port) as proxy:
            yield server, proxy


def is_read(link: Link) -> bool:
    return link.to_client.num_bytes >= BYTES_READ
