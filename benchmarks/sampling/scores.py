"""Figures that tell drawn texts from written ones: repetition, variety, words that do not exist."""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from itertools import pairwise
from pathlib import Path

#: Words over which variety is taken, so that it does not depend on a text's length.
STRETCH = 50


def words_of(text: str) -> list[str]:
    """The words in lower case, without marks; an apostrophe inside is part of one."""
    return re.findall(r"[a-z]+(?:'[a-z]+)*", text.lower())


def repeated_4grams(words: list[str]) -> float:
    """The part of the runs of four words that have come before in the same text."""
    grams = [tuple(words[start : start + 4]) for start in range(len(words) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def variety(words: list[str]) -> float | None:
    """Different words / words, over stretches of `STRETCH`; None for a shorter text."""
    starts = range(0, len(words) + 1, STRETCH)
    stretches = [words[start:end] for start, end in pairwise(starts)]
    if not stretches:
        return None
    return sum(len(set(each)) for each in stretches) / (STRETCH * len(stretches))


def unknown_words(words: list[str], known: Set[str]) -> float:
    """The part of the words that are not in ``known``."""
    return sum(word not in known for word in words) / len(words) if words else 0.0


def vocabulary(files: Iterable[Path]) -> set[str]:
    """Every word of some texts."""
    found: set[str] = set()
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                found.update(words_of(line))
    return found
