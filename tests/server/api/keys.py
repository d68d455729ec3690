"""Keys as clients send them, and as the operator's file has them."""

from __future__ import annotations

import base64

from server.api.auth import digest_of

ALICE, BOB, ROOT = "key-of-alice", "key-of-bob", "key-of-root"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def offers(key: str) -> list[str]:
    """The subprotocols of a browser's socket."""
    encoded = base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")
    return ["everstream.v1", f"everstream.key.{encoded}"]


def entry(name: str, key: str, *scopes: str, **limits: int) -> str:
    """A table of the file."""
    table = f'[[key]]\nname = "{name}"\nhash = "sha256:{digest_of(key).hex()}"\n'
    lines = "".join(f"{field} = {value}\n" for field, value in limits.items())
    return f"{table}scopes = {list(scopes)}\n[key.limits]\n{lines}"
