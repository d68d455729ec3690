"""`user`, `safety_identifier` and `prompt_cache_key` change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import Running

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 4, "seed": 1},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "seed": 1,
    },
}
LABELS = ("user", "safety_identifier", "prompt_cache_key")


@pytest.mark.process
@pytest.mark.parametrize("path", BODIES)
async def test_label_changes_nothing(server: Running, path: str) -> None:
    plain = (await server.http.post(path, json=BODIES[path])).json()
    body = BODIES[path] | dict.fromkeys(LABELS, "x" * 256)
    labelled = (await server.http.post(path, json=body)).json()
    assert (labelled["choices"], labelled["usage"]) == (plain["choices"], plain["usage"])
