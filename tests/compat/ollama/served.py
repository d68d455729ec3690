"""The client that the checks use."""

from __future__ import annotations

import os
from typing import Any

from ollama import Client

MODEL = "everstream-stories"
SERVER = os.environ["EVERSTREAM_URL"]
KEY = {"Authorization": "Bearer usual"}
QUESTION = [{"role": "user", "content": "Tell me of the old mill."}]
#: However soon the model would end its text, all tokens that are asked for come.
FEW: dict[str, Any] = {"num_predict": 24, "seed": 5, "ignore_eos": True}


def knows_tools() -> bool:
    """Whether the served model's chat template teaches it to call."""
    return "tools" in (client().show(MODEL).capabilities or ())


def client(headers: dict[str, str] = KEY, **options: Any) -> Client:
    """The usual key may do all that a client does."""
    return Client(host=SERVER, headers=headers, **options)
