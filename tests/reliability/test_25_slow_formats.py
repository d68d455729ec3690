"""25: a schema, pattern or grammar made to be slow is killed at a deadline; others continue."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.reliability.bystander import bystander
from tests.reliability.servers import ServerProcess

#: More waits than one format may take: for a busy machine.
TIMEOUT_S = 120.0
SLACK_BYTES = 64 << 20


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "slow", "schema": schema}}


SLOW: dict[str, dict[str, Any]] = {
    "a multiple with a million states": of_schema({"type": "integer", "multipleOf": 1_000_003}),
    "a million items": of_schema({"type": "array", "minItems": 1_000_000}),
    "references without an end": of_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}),
    "repetitions of repetitions": {"type": "regex", "regex": "((((a{99}){99}){99}){99}){99}"},
    "states that double": {"type": "regex", "regex": "(.*a.{30}){9}"},
    "a grammar without an end": {"type": "grammar", "grammar": 'start: "a" start'},
    "terminals that double": {
        "type": "grammar",
        "grammar": "start: A0\n"
        + "".join(f"A{index}: A{index + 1} A{index + 1}\n" for index in range(40))
        + 'A40: "x"\n',
    },
    "a deep grammar": {"type": "grammar", "grammar": f"start: {'(' * 30_000}"},
}
QUICK = of_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


async def complete(http: httpx.AsyncClient, format: dict[str, Any]) -> httpx.Response:
    body = {"prompt": "hi", "max_tokens": 60, "seed": 1, "response_format": format}
    return await http.post("/v1/completions", json=body)


@pytest.mark.timeout(600)
async def test_slow_formats_get_400_and_others_continue(long: bool) -> None:
    names = list(SLOW) if long else ["a multiple with a million states", "terminals that double"]
    with ServerProcess() as server:
        async with (
            bystander(server.port) as other,
            httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as http,
        ):
            assert (await complete(http, QUICK)).status_code == 200
            resident_bytes = server.resident_bytes()
            for name in names:
                first = len(other.times_s)
                asked = asyncio.create_task(complete(http, SLOW[name]))
                await other.more()
                answer = await asked
                error = answer.json()["error"]
                assert answer.status_code == 400, (name, answer.text)
                assert (error["param"], error["code"]) == ("response_format", "invalid_value"), name
                if long:
                    other.report(f"beside {name}", first)
            answer = await complete(http, QUICK)
            assert answer.status_code == 200
            value = json.loads(answer.json()["choices"][0]["text"])
            assert (type(value["name"]), type(value["age"])) == (str, int)
            assert server.get("/health")[0] == 200
            assert server.gauges()["everstream_slots", "held"] == 1
            assert server.resident_bytes() - resident_bytes < SLACK_BYTES


@pytest.mark.timeout(600)
async def test_formats_at_once_are_served_one_after_another() -> None:
    """A slow one among them holds up the others for its deadline, and spoils none of them."""
    formats = [{"type": "choice", "choices": [f"choice {index}"]} for index in range(8)]
    formats.insert(3, SLOW["a multiple with a million states"])
    with ServerProcess() as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) as http:
            answers = await asyncio.gather(*(complete(http, format) for format in formats))
    statuses = [answer.status_code for answer in answers]
    assert statuses == [200] * 3 + [400] + [200] * 5
    texts = [answer.json()["choices"][0]["text"] for answer in answers if answer.is_success]
    assert texts == [f"choice {index}" for index in range(8)]
