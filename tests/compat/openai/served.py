"""The clients that the checks use."""

from __future__ import annotations

import os
from typing import Any

from openai import AsyncOpenAI, OpenAI

MODEL = "everstream-stories"
SERVER = os.environ["EVERSTREAM_URL"]
BASE = f"{SERVER}/v1"
PROMPT = "Once upon a time"
#: However soon the model would end its text, all tokens that are asked for come.
ENDLESS = {"ignore_eos": True}
QUESTION = [{"role": "user", "content": "Tell me of the old mill."}]


def client(key: str = "usual", **options: Any) -> OpenAI:
    """The usual key may do all that a client does; others are in the tests' `conftest.py`."""
    return OpenAI(base_url=BASE, api_key=key, **{"max_retries": 0, **options})


def async_client(key: str = "usual", **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=BASE, api_key=key, **{"max_retries": 0, **options})
