"""The sentences of a page, by section: those of paragraphs and of items of lists."""

from __future__ import annotations

import re
from collections.abc import Iterator

#: Code, comments, pictures and tables have no sentences.
LEFT_OUT = re.compile(
    r"^```.*?^```$|<!--.*?-->|^!\[.*?\)$|^\|.*?$|^    .*?$", re.MULTILINE | re.DOTALL
)
#: Where an item of a list begins.
ITEM = re.compile(r"\n(?=- )")
#: After the end of a sentence and before the beginning of the next one.
BOUNDARY = re.compile(r"(?:(?<=[.!?])|(?<=[.!?]\*)|(?<=[.!?]\*\*))\s+(?=[*`\[(]*[A-Z`])")
LINK = re.compile(r"\]\([^)]*\)")
CODE = re.compile(r"`[^`]*`")


def sentences(text: str) -> Iterator[tuple[str, str]]:
    """Each sentence, on one line, after the heading (``## ``) that it stands below."""
    section = ""
    for block in LEFT_OUT.sub("", text).split("\n\n"):
        for part in ITEM.split(block.strip("\n")):
            if part.startswith("#"):
                section = part.lstrip("#").strip() if part.startswith("## ") else section
                continue
            flowed = " ".join(part.removeprefix("- ").split())
            yield from ((section, one) for one in BOUNDARY.split(flowed) if one)


def prose(sentence: str) -> str:
    """A sentence without code and the targets of links, whose figures are no results."""
    return CODE.sub("", LINK.sub("]", sentence))
