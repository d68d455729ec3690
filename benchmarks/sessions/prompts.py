"""What a user waits for whose prompt was read before: as ids, by its handle, or as text."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.process import ServerProcess
from benchmarks.sessions.report import Row, Target, times
from benchmarks.sessions.server import PROMPT, flags
from clients.python import Client

MIN_PREFIX_GAIN = 1000.0
TARGET_PREFIX_TOKENS = 100_000
NUM_HITS = 7
#: Tokens that continue a prefix by its handle.
FOLLOWING = list(range(300, 308))
NUM_NAMED = 50
#: Ids that exist in the bundled model's vocabulary, and are not special tokens.
PROMPT_IDS = range(300, 4000)
TARGET_TEXT_CHARS = 420_000
TARGET_TEXT_MS = 20.0
WORDS = PROMPT.split()


def prefix(folder: Path, lengths: Sequence[int], rounds: int) -> list[Row]:
    """The first token of a prompt: new, sent again, and of a few ids after its handle."""
    rows = []
    longest = {"EVERSTREAM_MAX_PROMPT_TOKENS": str(max(lengths) + 1)}
    draw = random.Random(0)
    with (
        ServerProcess(*flags(folder / "prefix"), environment=longest) as server,
        Client(server.url, timeout_s=600) as client,
    ):
        client.generate(PROMPT, max_tokens=1).text()  # the first request of a process is slower
        for length in lengths:
            cold, hit, named = [], [], []
            for _ in range(rounds if length < TARGET_PREFIX_TOKENS else 1):
                prompt = draw.choices(PROMPT_IDS, k=length)
                cold.append(_prompt_s(client, prompt))
                hit += [_prompt_s(client, prompt) for _ in range(NUM_HITS)]
                handle = client.complete(prompt, max_tokens=1, return_prefix=True).prefix
                named += [_prompt_s(client, FOLLOWING, handle) for _ in range(NUM_NAMED)]
            gain, named_gain = (
                statistics.median(cold) / statistics.median(s) for s in (hit, named)
            )
            at_least = Target(MIN_PREFIX_GAIN, "at least")
            target = at_least if length == TARGET_PREFIX_TOKENS else None
            rows += [
                times(f"{length:,} tokens, cold", cold),
                times(f"{length:,} tokens, again", hit),
                Row(f"{length:,} tokens, ratio", round(gain, 1), "x"),
                times(f"{length:,} tokens, by a handle", named),
                Row(f"{length:,} tokens, ratio", round(named_gain, 1), "x", target=target),
            ]
    return rows


def _prompt_s(client: Client, prompt: Sequence[int] | str, prefix: str | None = None) -> float:
    start = time.perf_counter()
    generation = client.generate(
        prompt, prefix=prefix, max_tokens=1, temperature=0.0, ignore_eos=True
    )
    next(generation)
    seconds = time.perf_counter() - start
    generation.text()
    return seconds


def text(folder: Path, lengths: Sequence[int], rounds: int) -> list[Row]:
    """The first token of a text that is new, sent again, and sent with a question behind it.

    Over HTTP and over the socket; each question is another one, and stays in the text.
    """
    rows = []
    longest = {"EVERSTREAM_MAX_PROMPT_TOKENS": str(max(lengths))}
    draw = random.Random(0)
    with (
        ServerProcess(*flags(folder / "text"), environment=longest) as server,
        Client(server.url, timeout_s=600) as client,
    ):
        ways: dict[str, Callable[[str], float]] = {
            "HTTP": lambda prompt: _answer_s(client, prompt),
            "socket": lambda prompt: _prompt_s(client, prompt),
        }
        for ask in ways.values():  # the first request of a process is slower
            ask(PROMPT)
        for length in lengths:
            story, name = _story(draw, length), f"{length:,} characters"
            rows.append(times(f"{name}, new", [_answer_s(client, story)]))
            at_most = Target(TARGET_TEXT_MS) if length == TARGET_TEXT_CHARS else None
            for way, ask in ways.items():
                again = [ask(story) for _ in range(rounds)]
                longer = []
                for number in range(rounds):
                    story += f" And then, said the owl, came number {number}."
                    longer.append(ask(story))
                rows += [
                    times(f"{name}, again, {way}", again, at_most),
                    times(f"{name} and more, {way}", longer, at_most),
                ]
    return rows


def _story(draw: random.Random, num_chars: int) -> str:
    """Words in another order each time, and a full stop now and then."""
    words = draw.choices([*WORDS, "sea."], k=num_chars)
    return " ".join(words)[: num_chars - 1] + "."


def _answer_s(client: Client, prompt: str) -> float:
    start = time.perf_counter()
    client.complete(prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
    return time.perf_counter() - start
