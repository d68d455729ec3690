"""What a session's log says: how long its text is, and which part of it a reader wants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from server.engine.types import Finished, TokenEvent
from server.engine.value import Accepted, Entry, Rewound
from server.store.base import Events


def length_after(entry: Entry, length: int) -> int:
    """Tokens of text after ``entry``, where there were ``length`` before it."""
    match entry:
        case TokenEvent():
            return entry.position + 1
        case Accepted():
            return entry.length + len(entry.tokens)
        case Finished():
            return entry.position  # shorter where it was cancelled within its prompt
        case Rewound():
            return entry.value.length
    return length


def num_tokens(entry: Entry) -> int:
    """What ``entry`` counts for where a log may have so many tokens."""
    return len(entry.tokens) if isinstance(entry, Accepted) else 1


def total_tokens(entries: Sequence[Entry]) -> int:
    """The sum of `num_tokens`."""
    prompts = (len(entry.tokens) - 1 for entry in entries if type(entry) is Accepted)
    return len(entries) + sum(prompts)


def as_logged(entry: Entry) -> Entry:
    """``entry`` as the log keeps it: states live in snapshots."""
    if isinstance(entry, Rewound):
        return Rewound(replace(entry.value, state=None))
    return entry


def past(entries: list[Entry], length: int, at: int | None) -> list[Entry]:
    """The first of ``entries``, up to where the text passes ``at`` tokens for good.

    ``length`` is that before them, at most ``at``.
    """
    end: int | None = None
    for index, entry in enumerate(entries):
        length = length_after(entry, length)
        if at is not None and length > at:
            end = index + 1 if end is None else end
        elif at is not None and length < at:
            end = None
    return entries[:end]


def events_after(entries: Iterable[Entry], seq: int, max_events: int) -> Events:
    """The events that count in ``seq``, from the one after it on: one for each number."""
    events: Events = []
    for entry in entries:
        if isinstance(entry, TokenEvent | Finished) and entry.seq > seq:
            if len(events) == max_events:
                break
            events.append(entry)
            seq = entry.seq
    return events


def superfluous(lengths: Sequence[int], max_snapshots: int) -> set[int]:
    """Indexes of the snapshots, oldest first and of such lengths, that need not be kept.

    Of the others the distances back from the newest grow about twofold. The two
    newest stay, and the oldest, from which all of the text can be reached.
    """
    kept = list(range(len(lengths)))
    while len(kept) > 3:
        present = lengths[kept[-1]]
        distances = [present - lengths[index] + 1 for index in kept]
        ratios = [distances[i - 1] / distances[i + 1] for i in range(1, len(kept) - 2)]
        least = min(range(len(ratios)), key=ratios.__getitem__)
        if ratios[least] >= 2 and len(kept) <= max_snapshots:
            break
        del kept[least + 1]
    return set(range(len(lengths))).difference(kept)
