"""``best_of``: several continuations are drawn, the most probable ones are shown."""

from __future__ import annotations

from tests.fakes import score_of
from tests.server.api.talk import usage_of
from tests.server.harness import Running


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
