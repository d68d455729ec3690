"""A conversation of 20 turns: from the second on the prefix cache has nearly all of each prompt."""

from __future__ import annotations

from typing import Any

from served import MODEL, client

NUM_TURNS = 20
#: As long as an agent's, which sends it with each request.
SYSTEM = " ".join(f"Rule {number}: a story has a mill and a fox." for number in range(120))


def test_tokens_of_20_turns_are_cached() -> None:
    """Claude Code's line of billing, which is another one in each request, makes no difference."""
    turns: list[Any] = []
    shares = []
    with client() as api:
        for number in range(NUM_TURNS):
            turns.append({"role": "user", "content": f"What came on day {number}?"})
            answer = api.messages.create(
                model=MODEL,
                max_tokens=24,
                messages=turns,
                system=[
                    {
                        "type": "text",
                        "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number:05x};",
                    },
                    {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}},
                ],
            )
            turns.append({"role": "assistant", "content": answer.content})
            usage = answer.usage
            cached = usage.cache_read_input_tokens or 0
            shares.append(cached / (cached + usage.input_tokens))
    assert min(shares[1:]) >= 0.95, shares
