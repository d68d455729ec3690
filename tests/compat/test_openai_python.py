"""OpenAI's package for Python."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from model.architectures.rwkv7.chat import THINKING
from model.tokenization.world import PADDED_SIZE, PUBLISHED
from model.tokenizer import Tokenizer
from tests.compat.conftest import serving
from tests.compat.environments import Client, python_client
from tests.docs.pages import DOCS
from tests.reliability.servers import ServerProcess
from tests.rwkv7 import SHAPES, published, write_pth

pytestmark = pytest.mark.timeout(400)

PAGES = (DOCS.parent / "README.md", DOCS / "start" / "first-chat.md")


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
    (program,) = re.findall(r"(?ms)^```python\n(.*?)^```", path.read_text("utf-8"))
    with ServerProcess("--store", tmp_path) as server:
        program = program.replace("http://127.0.0.1:8000", server.url)
        assert client.run("-c", program, timeout_s=60).strip()
