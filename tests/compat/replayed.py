"""Requests of clients that are too large to install, sent as their sources send them."""

from __future__ import annotations

from typing import Any

import httpx

from benchmarks import sse

Json = dict[str, Any]


def post(url: str, body: Json, headers: dict[str, str] | None = None) -> httpx.Response:
    """The answer to ``body`` with the usual key."""
    keyed = {"Authorization": "Bearer usual", **(headers or {})}
    return httpx.post(url, json=body, headers=keyed, timeout=60)


def chunks(answer: httpx.Response) -> list[Json]:
    """The JSON of a stream's events, whose end must be as OpenAI writes it."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return sse.values_of(answer.text, done=True)
