from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.fakes import FakeEngine, score_of
from tests.server.api.talk import kept, settled, story, usage_of, values_of
from tests.server.harness import Gate, Running, running

USAGE = {"include_usage": True}


async def test_json_answer_has_openai_shape(server: Running) -> None:
    response = await server.generate(model="fake", prompt="hi", max_tokens=20, seed=0, user="me")
    answer = response.json()
    assert response.status_code == 200
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": story(2, 20, 0), "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"] == usage_of(2, 20)
    assert (answer["session"], answer["seed"], answer["position"]) == (None, 0, 22)


async def test_drawn_seed_is_returned_and_repeats_the_answer(server: Running) -> None:
    first = (await server.generate(prompt="hi", max_tokens=12)).json()
    again = (await server.generate(prompt="hi", max_tokens=12, seed=first["seed"])).json()
    assert again["choices"] == first["choices"]


async def test_null_means_default(server: Running) -> None:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "stream")
    names += ("stop_token_ids", "ignore_eos", "session", "keep", "stream_options", "user", "seed")
    names += ("presence_penalty", "frequency_penalty", "n", "idempotency_key", "top_n_sigma")
    names += ("xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base")
    names += ("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers")
    response = await server.generate(prompt="hi", max_tokens=1, **dict.fromkeys(names))
    assert response.status_code == 200


async def test_prompt_of_token_ids(server: Running) -> None:
    answer = (await server.generate(prompt=[104, 105], max_tokens=4, seed=0)).json()
    assert answer["choices"][0]["text"] == story(2, 4, 0)


async def test_end_of_text_stops(server: Running) -> None:
    answer = (await server.generate(prompt="THE END", max_tokens=40)).json()
    assert answer["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
    }


async def test_stop_string_is_not_shown(server: Running) -> None:
    answer = (await server.generate(prompt="hi", max_tokens=400, seed=0, stop="fox")).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == "ce upon a time there was a little "


async def test_stream_has_one_chunk_per_token_and_a_last_one(server: Running) -> None:
    response = await server.generate(prompt="hi", max_tokens=20, seed=0, stream=True)
    chunks = values_of(response)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert len(chunks) == 21
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == story(2, 20, 0)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 20 + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" not in chunks[0]


async def test_stream_with_usage_ends_with_a_chunk_without_choices(server: Running) -> None:
    response = await server.generate(
        prompt="hi", max_tokens=2, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = values_of(response)
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert last["choices"] == []
    assert last["usage"] == usage_of(2, 2)


async def test_kept_session_continues_where_it_was(server: Running) -> None:
    first = (await server.generate(prompt="hi", max_tokens=10, seed=0, keep=True)).json()
    second = (await server.generate(session=first["session"], max_tokens=10, seed=0)).json()
    assert second["session"] == first["session"]
    assert second["position"] == 22
    assert second["choices"][0]["text"] == story(12, 10, 0)
    assert second["usage"]["prompt_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_before_the_first_token_is_a_plain_500(server: Running, stream: bool) -> None:
    response = await server.generate(prompt="<fail>", stream=stream)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert (await server.generate(prompt="hi", max_tokens=1)).status_code == 200


async def test_unknown_model_is_404(server: Running) -> None:
    response = await server.generate(model="other", prompt="hi")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_choices_have_seeds_that_count_up_and_one_prompt(server: Running) -> None:
    answer = (await server.generate(prompt="hi", max_tokens=9, seed=5, n=3)).json()
    assert answer["choices"] == [
        {"index": n, "text": story(2, 9, 5 + n), "logprobs": None, "finish_reason": "length"}
        for n in range(3)
    ]
    assert answer["usage"] == usage_of(2, 27)
    assert (answer["seed"], answer["session"]) == (5, None)
    assert (await settled(server)).held_slots == 0


async def test_choices_of_a_stream_come_mixed_and_done_comes_after_all(server: Running) -> None:
    response = await server.generate(
        prompt="hi", max_tokens=9, seed=5, n=3, stream=True, stream_options=USAGE
    )
    *chunks, last = values_of(response)
    assert "id: " not in response.text
    texts, reasons = {0: "", 1: "", 2: ""}, {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"] is not None:
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {n: story(2, 9, 5 + n) for n in range(3)}
    assert reasons == dict.fromkeys(range(3), "length")
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 27


async def test_more_choices_than_slots_wait_for_their_turn() -> None:
    async with running(FakeEngine(max_sessions=2, max_asleep=6)) as server:
        answer = (await server.generate(prompt="hi", max_tokens=9, seed=0, n=8)).json()
    assert [choice["text"] for choice in answer["choices"]] == [story(2, 9, n) for n in range(8)]


@pytest.mark.parametrize("more", [{"keep": True}, {"session": "kept"}])
async def test_session_that_is_kept_has_one_choice(server: Running, more: dict[str, Any]) -> None:
    if "session" in more:
        more = {"session": await kept(server)}
    response = await server.generate(prompt="hi", n=2, **more)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert (await server.generate(prompt="hi", n=1, max_tokens=1, **more)).status_code == 200


async def test_stream_of_a_kept_session_begins_with_a_chunk_that_names_it(server: Running) -> None:
    response = await server.generate(prompt="hi", max_tokens=2, seed=0, keep=True, stream=True)
    ids = [line for line in response.text.splitlines() if line.startswith("id: ")]
    epoch = server.async_engine.epoch_name(0)
    assert ids == [f"id: {epoch}:{seq}" for seq in (1, 2, 3)]
    assert response.text.startswith("data: ")
    session = response.text.partition('"session":"')[2].partition('"')[0]
    assert (await server.http.get(f"/v1/sessions/{session}")).json()["seq"] == 3


async def test_request_waits_for_a_slot_that_others_use() -> None:
    async with running(FakeEngine(max_sessions=1, max_asleep=2)) as server:
        answers = await asyncio.gather(
            *(server.generate(prompt="hi", max_tokens=300, seed=n) for n in range(3))
        )
        texts = [answer.json()["choices"][0]["text"] for answer in answers]
        assert texts == [story(2, 300, n) for n in range(3)]
        assert [await kept(server, seed=n) for n in range(3)]
        full = await server.generate(prompt="hi")
        assert (full.status_code, full.json()["error"]["code"]) == (503, "capacity_exhausted")


async def test_full_server_returns_503_with_retry_after() -> None:
    async with running(FakeEngine(max_sessions=1)) as server:
        await server.http.post("/v1/sessions")
        response = await server.generate(prompt="hi")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "capacity_exhausted"
        assert int(response.headers["retry-after"]) >= 1


async def test_full_queue_returns_429_with_retry_after() -> None:
    gate = Gate()
    async with running(FakeEngine(max_waiting=1, before_step=gate)) as server:
        first = asyncio.create_task(server.generate(prompt="hi", max_tokens=10**6))
        await gate.reached()
        gate.open()
        response = await server.generate(prompt="hi")
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
        first.cancel()
        await server.async_engine.drained()


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_frees_the_slot_at_once(stream: bool) -> None:
    gate = Gate()
    async with running(FakeEngine(before_step=gate)) as server:
        body = json.dumps({"prompt": "hi", "max_tokens": 1_000_000, "stream": stream})
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write((head + body).encode())
        await gate.reached()
        writer.close()
        await writer.wait_closed()
        gate.open()
        async with asyncio.timeout(60):
            await server.async_engine.drained()
        assert (await settled(server)).held_slots == 0


async def test_most_probable_are_shown_best_first(server: Running) -> None:
    body = {"prompt": "Who?", "max_tokens": 6, "seed": 3}
    drawn = (await server.generate(**body, n=5)).json()
    shown = (await server.generate(**body, n=2, best_of=5)).json()

    def mean(text: str) -> float:
        scores = [score_of(token) for token in text.encode()]
        return sum(scores) / len(scores)

    texts = [choice["text"] for choice in drawn["choices"]]
    assert len(set(map(mean, texts))) > 2, texts
    best = sorted(texts, key=mean, reverse=True)[:2]
    assert [choice["text"] for choice in shown["choices"]] == best
    assert [choice["index"] for choice in shown["choices"]] == [0, 1]


async def test_usage_counts_all_that_was_drawn_and_the_prompt_once(server: Running) -> None:
    answer = await server.generate(prompt="Who?", max_tokens=6, best_of=4)
    assert len(answer.json()["choices"]) == 1
    assert answer.json()["usage"] == usage_of(4, 24)
