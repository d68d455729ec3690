"""What clients are told while a store is away, or when it is back and empty: for both proofs 12."""

from __future__ import annotations

from collections.abc import Iterable

from tests.reliability.streams import PROMPT, SAMPLING, KeptStream, client_of


def check_lost(streams: Iterable[KeptStream]) -> None:
    """Each was told that its store is lost."""
    for stream in streams:
        last = stream.frames[-1]
        assert (last["type"], last["status"]) == ("error", 503), last


def check_reset(streams: Iterable[KeptStream]) -> None:
    """Each was told that its session is of another store, and is empty in this one."""
    for stream in streams:
        reset = stream.frames[-1]
        assert reset["session"] == stream.session
        assert reset["epoch"].rpartition("-")[0] != stream.epoch.rpartition("-")[0]
        assert (reset["seq"], reset["position"], reset["busy"]) == (0, 0, False)


async def check_only_kept_work_is_refused(url: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, **SAMPLING}
    async with client_of(url) as client:
        refused = await client.post("/v1/completions", json={**body, "keep": True})
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["code"] in ("store_failed", "store_lost")
        assert (await client.post("/v1/completions", json=body)).status_code == 200
