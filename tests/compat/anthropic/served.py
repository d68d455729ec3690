"""The clients that the checks use."""

from __future__ import annotations

import os
from typing import Any

from anthropic import Anthropic, AsyncAnthropic

MODEL = "everstream-stories"
SERVER = os.environ["EVERSTREAM_URL"]
QUESTION: list[Any] = [{"role": "user", "content": "Tell me of the old mill."}]

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather at a place",
    "input_schema": {
        "type": "object",
        "properties": {
            "place": {"type": "string", "maxLength": 12},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["place", "unit"],
        "additionalProperties": False,
    },
}


def client(key: str = "usual", **options: Any) -> Anthropic:
    """The usual key may do all that a client does; others are in the tests' `conftest.py`."""
    return Anthropic(base_url=SERVER, api_key=key, **{"max_retries": 0, **options})


def async_client(key: str = "usual", **options: Any) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=SERVER, api_key=key, **{"max_retries": 0, **options})
