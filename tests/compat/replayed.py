"""Requests of clients that are too large to install, sent as their sources send them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

Json = dict[str, Any]


def post(url: str, body: Json, headers: dict[str, str] | None = None) -> httpx.Response:
    """The answer to ``body`` with the usual key."""
    keyed = {"Authorization": "Bearer usual", **(headers or {})}
    return httpx.post(url, json=body, headers=keyed, timeout=60)


def chunks(answer: httpx.Response) -> list[Json]:
    """The JSON of a stream's events, whose end must be as OpenAI writes it."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = list(_data(answer.text))
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def _data(text: str) -> Iterator[str]:
    for message in text.strip().split("\n\n"):
        if message.startswith(":"):  # a comment, which every client skips
            continue
        assert message.startswith("data: "), message
        yield message.removeprefix("data: ")
