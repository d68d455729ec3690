"""Stands in for a store: the records of every session, in lists.

It forgets nothing, so that a session can be built again from any value that it has
ever had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from model.tokenizer import Tokenizer
from server.engine.kept import replay
from server.engine.sampling import PENALTY_WINDOW
from server.engine.session import (
    Accepted,
    Deleted,
    Entry,
    Opened,
    Past,
    Record,
    Rewound,
    Saved,
    Session,
    SessionValue,
    StateBlock,
)
from server.engine.text import Detokenizer
from server.engine.types import Finished, TokenEvent


class Ledger:
    """``entries`` are those of each session that was not deleted."""

    def __init__(self) -> None:
        self.entries: dict[str, list[Entry]] = {}

    def take(self, records: Sequence[Record]) -> None:
        """Keeps what an engine's `take_records` gave, and checks what a store relies on."""
        for id, entry in records:
            if isinstance(entry, Opened):
                assert id not in self.entries, id
                self.entries[id] = []
            self.entries[id].append(entry)
            if isinstance(entry, Saved | Rewound):
                assert entry.value.log_index == num_counted(self.entries[id]), entry
            if isinstance(entry, Deleted):
                del self.entries[id]

    def pasts(self, id: str, at: int | None = None) -> Iterator[Past]:
        """Every way to the session's present, or to its first ``at`` tokens; the newest last."""
        entries = self.entries[id]
        for index, entry in enumerate(entries):
            rest = entries[index + 1 :]
            cuts = [e.value.length for e in rest if isinstance(e, Rewound)]
            if at is not None:
                cuts.append(at)
            if isinstance(entry, Opened | Saved) and all(entry.value.min_length <= n for n in cuts):
                yield Past(entry.value, [e for e in rest if not isinstance(e, Saved)], at)

    def past(self, id: str, at: int | None = None) -> Past:
        """The shortest way."""
        *_, last = self.pasts(id, at)
        return last


def num_counted(entries: Sequence[Entry]) -> int:
    """What ``log_index`` counts."""
    return sum(isinstance(entry, Accepted | TokenEvent | Finished) for entry in entries)


def rebuilt(past: Past, tokenizer: Tokenizer) -> SessionValue:
    """The session of ``past``, as a restart finds it."""
    session = Session.of(past.value, Detokenizer(tokenizer), 0.0)
    progress = replay(session, past.value.progress, past.entries, past.at)
    return replace(session.value(past.value.state), progress=progress)


def unseen(value: SessionValue) -> tuple[int, ...]:
    """The tokens of the text that the state has not seen."""
    unfed = tuple(token for segment in value.unfed for token in segment.tokens)
    return unfed if value.pending is None else (*unfed, value.pending)


def recent(value: SessionValue) -> tuple[int, ...]:
    """The text's last tokens, as far as penalties look."""
    return (*value.recent, *unseen(value))[-PENALTY_WINDOW:]


def settled(
    value: SessionValue, feed: Callable[[StateBlock | None, Sequence[int]], object]
) -> tuple[object, ...]:
    """All that must be equal, however much of the text the state has seen already.

    ``feed`` is what the rest of it makes of the state.
    """
    progress = value.progress
    if progress is not None:
        # Another reader gives it another name; the log does not say what the prefix cache had.
        request = replace(progress.request, request_id="")
        progress = replace(progress, request=request, num_cached=0)
    counts = (value.length, value.epoch, value.seq, value.log_index)
    state = feed(value.state, unseen(value))
    return (state, recent(value), *counts, value.undecoded, progress, value.constraint)
