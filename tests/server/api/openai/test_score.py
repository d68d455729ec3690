"""How likely continuations are: the context is computed once, however many there are."""

from __future__ import annotations

from typing import Any

from tests.fakes import FakeEngine, most_likely, score_of
from tests.server.api.talk import settled
from tests.server.harness import Running, running


async def score(server: Running, **body: Any) -> dict[str, Any]:
    response = await server.http.post("/v1/score", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_each_continuation_has_its_sum_and_its_tokens(server: Running) -> None:
    answer = await score(
        server,
        model="fake",
        prompt="What is it?",
        continuations=[" A", " fox", [0, 8]],
        user="me",
    )
    expected = [b" A", b" fox", b"\x00\x08"]
    assert answer["model"] == "fake"
    for index, (found, tokens) in enumerate(zip(answer["data"], expected, strict=True)):
        values = [score_of(token) for token in tokens]
        assert found == {
            "object": "score",
            "index": index,
            "logprob": sum(values),
            "num_tokens": len(tokens),
            "is_greedy": all(token % 8 == 0 for token in tokens),
            "tokens": list(tokens),
            "token_logprobs": values,
            "top_logprobs": None,
        }
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == 11 + 2 + 4 + 2
    assert (await settled(server)).held_slots == 0


async def test_most_probable_tokens_are_named_by_id(server: Running) -> None:
    answer = await score(server, prompt=[65], continuations=[[66, 67]], top=2)
    best = [[id, value] for id, value in most_likely(2)]
    assert answer["data"][0]["top_logprobs"] == [best, best]


async def test_empty_context_is_the_start_token(server: Running) -> None:
    (found,) = (await score(server, prompt="", continuations=["hi"]))["data"]
    assert found["token_logprobs"] == [score_of(104), score_of(105)]


async def test_context_is_fed_once(server: Running) -> None:
    before = (await server.stats()).prompt_tokens_total
    context = "x" * 500
    await score(server, prompt=context, continuations=["a", "b", "c", "d"])
    assert (await settled(server)).prompt_tokens_total - before <= 500 + 2 * 4


async def test_more_continuations_than_slots_wait_for_their_turn() -> None:
    async with running(FakeEngine(max_sessions=2, max_asleep=300)) as server:
        answer = await score(server, prompt="hi", continuations=[[n % 200] for n in range(256)])
        assert [one["logprob"] for one in answer["data"]] == [score_of(n % 200) for n in range(256)]
        assert (await settled(server)).held_slots == 0


async def test_continuations_that_do_not_fit_are_a_503(server: Running) -> None:
    body = {"prompt": "hi", "continuations": ["a"] * 100}
    response = await server.http.post("/v1/score", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "capacity_exhausted")
    assert (await settled(server)).held_slots == 0


async def test_state_that_is_not_finite_is_an_error(server: Running) -> None:
    response = await server.http.post(
        "/v1/score", json={"prompt": "<fail>", "continuations": ["a", "b"]}
    )
    assert response.status_code == 500
    assert (await settled(server)).held_slots == 0
