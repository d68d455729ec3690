"""An answer that the server's death cuts: the same request under its key gives all of it.

Run by the outer test, which kills the server in the middle. With ``stream`` the program catches the
error and asks again; with ``whole`` the package retries by itself.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx2
from anthropic import APIError
from served import MODEL, QUESTION, client

ASKED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 500,
    "messages": QUESTION,
    "extra_headers": {"Idempotency-Key": "the lines"},
}


def main(way: str) -> None:
    """Prints the text of an answer that comes in a ``stream``, or ``whole``."""
    with client(max_retries=100, timeout=300) as api:
        if way == "whole":
            print(json.dumps(api.messages.create(**ASKED).content[0].text))
            return
        read = ""
        while True:
            text = ""
            try:
                with api.messages.stream(**ASKED) as stream:
                    for piece in stream.text_stream:
                        text += piece
                break
            except (APIError, httpx2.HTTPError) as error:
                print("cut", type(error).__name__)
                read = text or read
        assert text.startswith(read)
        assert read
        print(json.dumps(text))


if __name__ == "__main__":
    main(sys.argv[1])
