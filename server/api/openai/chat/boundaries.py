"""Where a conversation's next prompt will begin like this one: there its state is worth keeping.

A prompt ends with what only belongs to it, such as the words that open an answer, the markers
of thinking, or how long to think. The next prompt has the answer in their place. So the messages
are rendered once more, followed by an answer and a question, and compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from model.tokenizer import Tokenizer
from server.chat.marks import Marks

#: The prefix cache keeps no shorter beginnings; places that are nearer to each other are as one.
MIN_TOKENS = 32
#: What a turn to come says. It begins and ends with a letter, as most texts do.
_SAID = "So it was said"
_ANSWER, _QUESTION = ({"role": role, "content": _SAID} for role in ("assistant", "user"))

#: Characters before the place where two texts part: tokens of the rest are those of the whole.
_TAIL_CHARS = 2048
#: Tokens that must be the same before two ways to cut a text are taken for one.
_NUM_SYNCED = 8


def continuations(
    messages: Sequence[Mapping[str, Any]], with_tools: bool
) -> Sequence[Mapping[str, Any]]:
    """What to render with ``messages`` for texts that begin like prompts which continue them.

    One with an answer and a question; with tools also one that ends behind the messages, since
    calls and their results follow without a question, after which past thinking may be left out.
    """
    following = [_QUESTION] if messages[-1]["role"] == "assistant" else [_ANSWER, _QUESTION]
    found = [{"following": following, "add_generation_prompt": True}]
    return found + [{"following": [], "add_generation_prompt": False}] * with_tools


def places(
    ids: Sequence[int],
    text: str,
    shared: Sequence[tuple[int, str]],
    marks: Marks,
    tokenizer: Tokenizer,
) -> tuple[int, ...]:
    """After how many of ``ids``, the tokens of ``text``, another text ceases to be the same.

    ``shared`` has for each other text how many characters are the same, and its next ones.
    Ascending. Places that are not worth keeping are left out: too early, or shortly behind
    another one. So are those of which it is not certain how the texts are cut there.
    """
    found = {_agreed(ids, text, *each, marks, tokenizer) for each in shared}
    kept: list[int] = []
    for place in sorted(found):
        if place >= (kept[-1] if kept else 0) + MIN_TOKENS:
            kept.append(place)
    return tuple(kept)


def _agreed(
    ids: Sequence[int], text: str, num_same: int, ahead: str, marks: Marks, tokenizer: Tokenizer
) -> int:
    """Encodes the ends of the texts alone; 0 where their tokens are not those of the whole.

    White space where they part may be cut with what follows it, and so is not counted.
    """
    common = len(text[:num_same].rstrip())
    start = max(0, common - _TAIL_CHARS)
    tail = marks.ids(text[start:], tokenizer)
    compared = (text[start:common], text[start:num_same] + ahead)
    same = min(_num_equal(tail, marks.ids(part, tokenizer)) for part in compared)
    place, synced = len(ids) - len(tail) + same, min(same, _NUM_SYNCED)
    if place <= 0 or ids[place - synced :] != tail[same - synced :]:
        return 0
    return place


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
