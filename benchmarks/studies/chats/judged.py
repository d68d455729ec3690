"""The chats of `benchmarks.studies.chats` before a judge who does not know which model answered.

    python -m benchmarks.studies.chats.judged sheet FILE       # all chats, answers as A and B
    python -m benchmarks.studies.chats.judged count VERDICTS   # {"1": {"verdict": "A", "why": ""}}

Which of the two is A is drawn for each chat, from a seed that the sheet does not show.
``count`` writes how often each was preferred, how likely so clear a result is between equals (a
sign test without the ties, two-sided), and every verdict with its reason.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, Figures, read_result, write_result
from benchmarks.studies.chats.__main__ import RESULT

VERDICTS = RESULTS / "chats_judged.json"
SEED = "chats-blind-7193"
LETTERS = "AB"


def orders(chats: list[Figures], seed: str = SEED) -> list[list[str]]:
    """For each chat the names of the two models, A first."""
    draw = random.Random(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big"))
    names = [sorted(chat["answers"]) for chat in chats]
    for pair in names:
        draw.shuffle(pair)
    return names


def sheet(chats: list[Figures], seed: str = SEED) -> str:
    """All chats without the models' names."""
    lines: list[str] = []
    for number, (chat, names) in enumerate(zip(chats, orders(chats, seed), strict=True), 1):
        lines.append(f"===== Chat {number} =====")
        for turn, question in enumerate(chat["questions"]):
            lines.append(f"[User] {question}")
            answers = (chat["answers"][name][turn] for name in names)
            lines += [f"[{x}] {answer}" for x, answer in zip(LETTERS, answers, strict=True)]
            lines.append("")
    return "\n".join(lines)


def count(chats: list[Figures], verdicts: dict[str, Any], seed: str = SEED) -> Figures:
    """How many chats each model won, and what was said of each."""
    wins, rows = Counter[str](), []
    for number, names in enumerate(orders(chats, seed), 1):
        given = verdicts[str(number)]
        letter = given["verdict"]
        winner = "tie" if letter == "tie" else names[LETTERS.index(letter)]
        wins[winner] += 1
        rows.append({"chat": number, "better": winner, "why": _named(given["why"], names)})
    by_chance = sign_test([number for name, number in wins.items() if name != "tie"])
    return {"wins": dict(wins), "by_chance": by_chance, "chats": rows}


def sign_test(wins: list[int]) -> float:
    """The probability of so uneven a count, or a more uneven one, between two equals."""
    total, most = sum(wins), max(wins, default=0)
    tail = sum(math.comb(total, won) for won in range(most, total + 1)) / 2**total
    return min(1.0, 2 * tail)


def _named(reason: str, names: list[str]) -> str:
    """A reason as it was given, with what its letters stand for."""
    return f"{reason} (A: {names[0]}, B: {names[1]})"


def main(command: list[str] | None = None) -> None:
    """Writes the sheet, or the result of the verdicts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("sheet", "count"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--judge", default="a large language model", help="who has judged")
    parser.add_argument("--seed", default=SEED, help="of the order of the two models")
    options = parser.parse_args(command)
    chats = read_result(RESULT)["chats"]
    if options.command == "sheet":
        options.file.write_text(sheet(chats, options.seed), encoding="utf-8")
        return
    verdicts = json.loads(options.file.read_text(encoding="utf-8"))
    found = {"benchmark": "chats.judged", "judge": options.judge, "seed": options.seed}
    write_result(VERDICTS, {**found, **count(chats, verdicts, options.seed)})


if __name__ == "__main__":
    main()
