"""A restart keeps what prompts begin with: it is not computed again, and the text is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.reliability.servers import STUCK_S, ServerProcess
from tests.tiny import write_model
from tests.waiting import eventually

SYSTEM = "You are a narrator. Stay in the wood, and never speak of the sea. " * 12
QUESTION, OTHER = "Where does the girl live?", "Who is she?"
KEYS = ("first-key-of-the-test", "second-key-of-the-test")


class Restarted:
    """One server after the other, with the same model and store."""

    def __init__(self, folder: Path) -> None:
        self.prefixes = folder / "store" / "prefixes"
        self._model, self._store = write_model(folder / "model"), folder / "store"

    def server(self, *flags: object) -> ServerProcess:
        keys = [flag for key in KEYS for flag in ("--api-key", key)]
        return ServerProcess("--model", self._model, "--store", self._store, *keys, *flags)

    def sizes(self) -> list[int]:
        """Of the states on the disk."""
        return [file.stat().st_size for file in self.prefixes.glob("*/*.safetensors")]


@pytest.fixture
def restarted(tmp_path: Path) -> Restarted:
    return Restarted(tmp_path)


def ask(server: ServerProcess, question: str = QUESTION, key: str = KEYS[0]) -> tuple[str, int]:
    """The greedy text, and how many tokens of the prompt were cached."""
    body = {
        "prompt": SYSTEM + question,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{server.url}/v1/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=STUCK_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found["choices"][0]["text"], cached


def test_first_prompt_after_a_graceful_restart_is_a_hit(restarted: Restarted) -> None:
    """Though it came once, and memory had room for it."""
    with restarted.server("--prefix-disk", 0) as server:
        texts = [ask(server, question)[0] for question in (QUESTION, OTHER)]
        assert server.stop() == 0
    assert restarted.sizes() == [], "it is off"
    with restarted.server() as server:
        assert ask(server) == (texts[0], 0)
        assert restarted.sizes() == [], "it is not known to be of use again"
        assert server.stop() == 0
    with restarted.server() as server:
        assert ask(server, key=KEYS[1]) == (texts[0], 0), "another tenant's"
        again, cached = ask(server)
        assert again == texts[0]
        assert cached > 500
        again, cached = ask(server, OTHER)
        assert again == texts[1]
        assert cached >= 512
        assert server.stop() == 0


async def test_shared_beginning_outlives_kill_9(restarted: Restarted) -> None:
    """It is written in the background when a third prompt has begun with it."""
    with restarted.server() as server:
        texts = [ask(server)[0] for _ in range(3)]
        await eventually(lambda: restarted.sizes() != [])
        server.kill()
    with restarted.server() as server:
        again, cached = ask(server)
        assert [again] * 3 == texts
        assert cached > 500
