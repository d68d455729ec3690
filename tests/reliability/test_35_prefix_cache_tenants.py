"""35: a prompt that came before is not computed again, but only for the tenant that sent it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.reliability.servers import LOCAL, STUCK_S, ServerProcess
from tests.tiny import write_model

KEYS = ("first-key-of-the-test", "second-key-of-the-test")
PROMPT = "Once upon a time there was a little girl who lived in a wood. " * 12
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


class Prefixes(NamedTuple):
    """What `/metrics` says of the cache."""

    hits: float
    misses: float
    saved_tokens: float

    def __sub__(self, other: Prefixes) -> Prefixes:
        return Prefixes(*(now - before for now, before in zip(self, other, strict=True)))


class Tenant:
    def __init__(self, server: ServerProcess, key: str) -> None:
        self._url = f"http://{LOCAL}:{server.port}"
        self._headers = {"Authorization": f"Bearer {key}"}

    def ask(self, **more: object) -> tuple[str, Prefixes]:
        """The text of a completion, and what the cache counted for it."""
        before = self._prefixes()
        body = {**BODY, **more}
        with self._client() as http:
            response = http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"], self._prefixes() - before

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self._url, headers=self._headers, timeout=STUCK_S)

    def _prefixes(self) -> Prefixes:
        with self._client() as http:
            text = http.get("/metrics").text
        samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]
        lookups = {
            sample.labels["result"]: sample.value
            for sample in samples
            if sample.name == "everstream_prefix_lookups_total"
        }
        (saved,) = (s.value for s in samples if s.name == "everstream_prefix_saved_tokens_total")
        return Prefixes(lookups["hit"], lookups["miss"], saved)


def test_same_tenant_hits_and_another_misses(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    flags = [flag for key in KEYS for flag in ("--api-key", key)]
    with ServerProcess("--model", model, "--store", tmp_path / "store", *flags) as server:
        one, other = (Tenant(server, key) for key in KEYS)
        text, cold = one.ask()
        assert cold == Prefixes(0, 1, 0)
        for keep in (False, True):
            again, warm = one.ask(keep=keep)
            assert (again, warm.hits, warm.misses) == (text, 1, 0)
            assert warm.saved_tokens > 100
        # For the other it is a prompt like any: as if its beginning had never been sent.
        _, first = other.ask(prompt=PROMPT + " And then?")
        assert first == Prefixes(0, 1, 0)
        theirs, second = other.ask()
        assert (theirs, second.hits) == (text, 1)
        assert server.stop() == 0
