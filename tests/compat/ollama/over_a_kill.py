"""A stream that a kill of the server cuts, and the same call once more under the same key."""

from __future__ import annotations

import httpx
from ollama import Client
from served import KEY, MODEL, QUESTION, client

OPTIONS = {"num_predict": 3000, "seed": 5, "ignore_eos": True}
#: A connection that the server has not accepted when it is killed is lost as well.
MAX_CALLS = 5


def streamed(api: Client, seen: list[str]) -> bool:
    """Whether all of the answer has come; ``seen`` gets its pieces."""
    seen.clear()
    try:
        for part in api.chat(MODEL, QUESTION, options=OPTIONS, stream=True):
            seen.append(part.message.content or "")
            if len(seen) == 20:
                print("begun", flush=True)
    except httpx.HTTPError:
        return False
    return True


def main() -> None:
    """Says when a stream has begun, whether it was cut, and whether the text is that of another."""
    # Until the server is there again.
    transport = httpx.HTTPTransport(retries=10)
    api = client(headers={**KEY, "Idempotency-Key": "the old mill"}, transport=transport)
    first, again = list[str](), list[str]()
    assert not streamed(api, first)
    print("cut", flush=True)
    assert any(streamed(api, again) for _ in range(MAX_CALLS))
    whole = "".join(again)
    assert whole.startswith("".join(first)) and len(first) >= 20
    uncut = client().chat(MODEL, QUESTION, options=OPTIONS).message.content
    print("same" if whole == uncut else "another text", flush=True)


main()
