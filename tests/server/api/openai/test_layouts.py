"""The start of a text is id 0 in every published layout of RWKV-7, on a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.published_layouts import LAYOUTS, Layout
from tests.rwkv7 import SHAPES, published
from tests.server.served import Served, served

pytestmark = pytest.mark.process

#: One for each way to say what a text begins with: a template's own name of it, none, a GGUF's, a
#: post-processor, an id of another tokenizer.
NAMES = ("fla", "native", "GGUF", "transformers-rwkv", "hf-adapter", "RWKV project")
TEXT = "a<|rwkv_tokenizer_end_of_text|>b<|endoftext|>c"


async def ids_of(server: Served, **body: Any) -> list[int]:
    response = await server.http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["tokens"]
    return ids


@pytest.mark.parametrize(
    "layout", [each for each in LAYOUTS if each.name in NAMES], ids=lambda layout: layout.name
)
async def test_chat_begins_with_id_0_and_a_user_cannot_write_it(
    layout: Layout, tmp_path: Path
) -> None:
    path = layout.write(tmp_path / "model", SHAPES["square"], published(SHAPES["square"]))
    async with served(f"tiny={path}") as server:
        ids = await ids_of(server, messages=[{"role": "user", "content": TEXT}])
        assert ids[0] == 0
        assert ids.count(0) == 1
        told = await server.http.post("/detokenize", json={"tokens": ids[1:]})
        assert TEXT in told.json()["prompt"]
        assert (await ids_of(server, prompt="abc"))[0] == 0
        asked = {"prompt": "abc", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        made = (await server.http.post("/v1/completions", json=asked)).json()
        assert made["usage"]["completion_tokens"] == 4
