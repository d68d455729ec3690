"""Where a conversation's next prompt will begin like this one: there its state is worth keeping.

A prompt ends with what only belongs to it, such as the words that open an answer, the markers
of thinking, or how long to think. The next prompt has the answer in their place. So the messages
are rendered once more, followed by an answer and a question, and compared.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from model.tokenizer import Tokenizer
from server.chat.marks import Marks
from server.errors import InvalidRequest

#: The prefix cache keeps no shorter beginnings; places that are nearer to each other are as one.
MIN_TOKENS = 32
#: What a turn to come says. It begins and ends with a letter, as most texts do.
_SAID = "So it was said"
_ANSWER, _QUESTION = ({"role": role, "content": _SAID} for role in ("assistant", "user"))

#: Characters before the place where two texts part: tokens of the rest are those of the whole.
_TAIL_CHARS = 2048
#: Characters behind it, which may decide how those before it are cut.
_AHEAD_CHARS = 64
#: Tokens that must be the same before two ways to cut a text are taken for one.
_NUM_SYNCED = 8

#: Renders messages, with the words that open an answer or without.
Render = Callable[[Sequence[Mapping[str, Any]], bool], Awaitable[str]]


async def shared_texts(
    render: Render, messages: Sequence[Mapping[str, Any]], with_tools: bool
) -> list[str]:
    """Texts that begin like prompts which continue ``messages``.

    One with an answer and a question; with tools also one that ends behind the messages, since
    calls and their results follow without a question, after which past thinking may be left out.
    """
    following = [_QUESTION] if messages[-1]["role"] == "assistant" else [_ANSWER, _QUESTION]
    asked = [([*messages, *following], True), *([(messages, False)] if with_tools else [])]
    texts: list[str] = []
    for more, opens_answer in asked:
        try:
            texts.append(await render(more, opens_answer))
        except InvalidRequest:
            continue  # a template that does not allow such a turn
    return texts


def places(
    ids: Sequence[int], text: str, others: Sequence[str], marks: Marks, tokenizer: Tokenizer
) -> tuple[int, ...]:
    """After how many of ``ids``, the tokens of ``text``, one of ``others`` ceases to be the same.

    Ascending. Places that are not worth keeping are left out: too early, or shortly behind
    another one. So are those of which it is not certain how the texts are cut there.
    """
    found = {_agreed(ids, text, other, marks, tokenizer) for other in others}
    kept: list[int] = []
    for place in sorted(found):
        if place >= (kept[-1] if kept else 0) + MIN_TOKENS:
            kept.append(place)
    return tuple(kept)


def _agreed(ids: Sequence[int], text: str, other: str, marks: Marks, tokenizer: Tokenizer) -> int:
    """Encodes the ends of the texts alone; 0 where their tokens are not those of the whole.

    White space where they part may be cut with what follows it, and so is not counted.
    """
    common = len(text[: _common_chars(text, other)].rstrip())
    start = max(0, common - _TAIL_CHARS)
    tail = marks.ids(text[start:], tokenizer)
    compared = (other[start:common], other[start : common + _AHEAD_CHARS])
    same = min(_num_equal(tail, marks.ids(part, tokenizer)) for part in compared)
    place, synced = len(ids) - len(tail) + same, min(same, _NUM_SYNCED)
    if place <= 0 or ids[place - synced :] != tail[same - synced :]:
        return 0
    return place


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _common_chars(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
