"""Responses outlive the server: kill -9 in the middle of a stream, and what follows a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import sse
from tests.reliability.servers import STUCK_S, ServerProcess
from tests.reliability.streams import tiny_server
from tests.waiting import eventually

Json = dict[str, Any]

BODY: Json = {
    "input": "Who lives there?",
    "seed": 3,
    "temperature": 0.9,
    "ignore_eos": True,
    "max_output_tokens": 400,
}


def server_at(folder: Path) -> ServerProcess:
    return tiny_server(folder, environment={"EVERSTREAM_SAVE_INTERVAL_TOKENS": "64"})


def url_of(server: ServerProcess, path: str = "") -> str:
    return f"{server.url}/v1/responses{path}"


def begun(server: ServerProcess, num_events: int, **more: Any) -> list[Json]:
    """The first events of a response that is being made."""
    body = {**BODY, "stream": True, **more}
    events: list[Json] = []
    with httpx.stream("POST", url_of(server), json=body, timeout=STUCK_S) as answer:
        for event in sse.read_blocking(answer.iter_bytes()):
            events.append(event.value)
            if len(events) == num_events:
                server.kill()
                return events
    raise AssertionError(f"it has ended after {len(events)} events")


def streamed(server: ServerProcess, id: str, **query: Any) -> list[Json]:
    answer = httpx.get(
        url_of(server, f"/{id}"), params={"stream": "true", **query}, timeout=STUCK_S
    )
    assert answer.status_code == 200, answer.text
    return sse.values_of(answer.text)


def got(server: ServerProcess, id: str, path: str = "") -> Json:
    answer = httpx.get(url_of(server, f"/{id}{path}"), timeout=STUCK_S)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


@pytest.mark.parametrize("num_events", [1, 5, 60])
def test_stream_continues_after_a_kill(tmp_path: Path, num_events: int) -> None:
    with server_at(tmp_path) as server:
        events = begun(server, num_events, background=True)
        server.start()
        id = events[0]["response"]["id"]
        later = streamed(server, id, starting_after=events[-1]["sequence_number"])
        assert [e["sequence_number"] for e in events + later] == list(
            range(len(events) + len(later))
        )
        assert streamed(server, id) == events + later
        assert got(server, id) == later[-1]["response"]
    assert later[-1]["type"] == "response.incomplete"
    assert later[-1]["response"]["usage"]["output_tokens"] == BODY["max_output_tokens"]


def test_text_is_what_it_would_have_been_without_the_kill(tmp_path: Path) -> None:
    with server_at(tmp_path) as server:
        killed = begun(server, 30, background=True)[0]["response"]["id"]
        server.start()
        after = streamed(server, killed)[-1]["response"]
        whole = httpx.post(url_of(server), json=BODY, timeout=STUCK_S).json()
    assert after["output"][0]["content"] == whole["output"][0]["content"]


async def test_response_completes_without_a_reader(tmp_path: Path) -> None:
    with server_at(tmp_path) as server:
        id = begun(server, 10)[0]["response"]["id"]
        server.start()
        await eventually(lambda: got(server, id)["status"] == "incomplete")
        assert got(server, id)["usage"]["output_tokens"] == BODY["max_output_tokens"]


def test_input_and_next_responses_are_known_after_a_kill(tmp_path: Path) -> None:
    with server_at(tmp_path) as server:
        body = {**BODY, "max_output_tokens": 20, "metadata": {"a": "b"}, "instructions": "Be kind."}
        first = httpx.post(url_of(server), json=body, timeout=STUCK_S).json()
        server.restart()
        assert got(server, first["id"]) == first
        (item,) = got(server, first["id"], "/input_items")["data"]
        assert item["content"] == [{"type": "input_text", "text": BODY["input"]}]
        follow = {**body, "input": "And then?", "previous_response_id": first["id"]}
        second = httpx.post(url_of(server), json=follow, timeout=STUCK_S).json()
        usage = first["usage"]["total_tokens"]
        assert second["usage"]["input_tokens_details"]["cached_tokens"] == usage
        server.restart()
        deleted = httpx.delete(url_of(server, f"/{first['id']}"), timeout=STUCK_S)
        assert deleted.json()["deleted"]
        server.restart()
        lost = httpx.get(url_of(server, f"/{first['id']}"), timeout=STUCK_S)
        assert lost.status_code == 404
        assert got(server, second["id"]) == second


def test_key_gives_the_same_response_after_a_kill(tmp_path: Path) -> None:
    with server_at(tmp_path) as server:
        id = begun(server, 8, idempotency_key="k")[0]["response"]["id"]
        server.start()
        again = httpx.post(url_of(server), json={**BODY, "idempotency_key": "k"}, timeout=STUCK_S)
        assert again.json()["id"] == id
        assert again.json()["usage"]["output_tokens"] == BODY["max_output_tokens"]
