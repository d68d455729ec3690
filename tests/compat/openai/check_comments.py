"""Comments of a silent stream: the package skips them, also between events with ids."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from served import BASE, ENDLESS, MODEL, client

#: It takes long enough to read for the comments that the tests' `conftest.py` asks for.
LONG = "The miller went to the mill. " * 2000
COMMENT = b": keep-alive\n\n"


def bytes_of_stream(prompt: str) -> bytes:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "stream": True, **ENDLESS}
    headers = {"content-type": "application/json", "authorization": "Bearer usual"}
    request = urllib.request.Request(
        f"{BASE}/completions", json.dumps(body).encode(), headers, method="POST"
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bytes(answer.read())


def test_comments_before_the_first_token_are_skipped() -> None:
    # No prompt begins as another one: that would not have to be read again.
    assert COMMENT in bytes_of_stream(f"First. {LONG}")
    with client() as openai:
        stream = openai.completions.create(
            model=MODEL,
            prompt=f"Second. {LONG}",
            max_tokens=4,
            seed=0,
            stream=True,
            extra_body=ENDLESS,
        )
        assert len(list(stream)) >= 4
        kept = openai.completions.create(
            model=MODEL,
            prompt=f"Kept. {LONG}",
            max_tokens=4,
            stream=True,
            extra_body={**ENDLESS, "keep": True},
        )
        assert len(list(kept)) >= 4
        question: Any = [{"role": "user", "content": f"Third. {LONG}"}]
        events = list(
            openai.responses.create(
                model=MODEL, input=question, max_output_tokens=16, stream=True, extra_body=ENDLESS
            )
        )
        assert events[-1].type == "response.incomplete"
