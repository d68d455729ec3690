"""Redo of the write-ahead log: what follows from its rows; what cannot be read is skipped.

A line that was altered or is missing costs its session, which is put into quarantine: it
would continue from another history than its clients have seen. Where not even the sessions
are known that a row was about, it costs those that ran then and that no later line proves.
What the database refuses costs its session too (`without_refused`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from server.engine.value import Deleted, Entry
from server.store.codec import Malformed, unpack_entry
from server.store.database import Database
from server.store.errors import brief
from server.store.heads import Head
from server.store.log import Log
from server.store.log_rows import Line, LoggedEntry, LogRow, unpack_row

logger = logging.getLogger(__name__)

L = TypeVar("L", bound=Log)


#: Whether the session with this key is read.
Wanted = Callable[[int], bool]


def everyone(key: int) -> bool:
    """All sessions."""
    return True


def recover(
    log: L, last_row: int | None, held: Iterable[str], now_s: float, is_wanted: Wanted = everyone
) -> L:
    """``log`` with the journal in its heads, within a transaction of the caller's.

    Rows after ``last_row`` are those of a commit that has failed: they go.
    ``held`` are the sessions that the engine has.
    """
    log.last_row = last_row or 0
    redo = Redo(log, now_s, is_wanted)
    for row, data, keys in log.rows_up_to(last_row):
        log.last_row = row
        redo.row(row, unpack_row(data, keys))
    redo.end()
    for head in log.heads.values():
        head.is_held = False
    for id in held:
        if (held_head := log.head(id)) is not None:
            held_head.is_held = True
    return log


class Redo:
    """Brings the heads of a log forward, row by row."""

    def __init__(self, log: Log, now_s: float, is_wanted: Wanted) -> None:
        self._log, self._now_s, self._is_wanted = log, now_s, is_wanted
        self._by_key: dict[int, Head | None] = {}
        self._doubtful: set[Head] = set()
        self._previous: int | None = None

    def row(self, number: int, row: LogRow) -> None:
        """The next one that there is."""
        if self._previous is not None and number != self._previous + 1:
            self._doubt(number)
        self._previous = number
        good, has_bad = self._apply(number, row)
        if row.keys is None:
            if has_bad or not row.is_whole:
                self._doubt(number)
            return
        for key in row.keys - good:
            self._lose(number, key)

    def end(self) -> None:
        """After the last one."""
        for head in self._doubtful:
            if head.broken is None:
                why = "a row of the journal that may have been about it is missing or unreadable"
                self._log.give_up(head, why, self._now_s)

    def _apply(self, number: int, row: LogRow) -> tuple[Counter[int], bool]:
        """Keys of the lines that could be read, and whether there was any other."""
        steps: list[LoggedEntry] = []
        due: set[Head] = set()
        good: Counter[int] = Counter()
        for line in row.lines:
            try:
                step = self._step(line, number)
            except (Malformed, TypeError):
                continue
            good[line.key] += 1
            if step is None:
                continue
            self._doubtful.discard(step[0])
            steps.append(step)
            due |= self._log.advance((step,), number) or set()
            if isinstance(step[1], Deleted):
                due.discard(step[0])
        self._log.apply(steps, due, number, self._now_s)
        return good, good.total() < len(row.lines)

    def _step(self, line: Line, number: int) -> LoggedEntry | None:
        """What a line means; None if its session is gone, or has it in its tables.

        Raises `Malformed` and `TypeError` for a line that was altered.
        """
        if not self._is_wanted(line.key):
            return None
        head = self._head(line.key)
        if head is None and line.entry[0] == "opened":
            _check(line, 0)
            opened = self._log.opened_again(line.key, line.entry, number, line.rest)
            self._by_key[line.key] = opened and opened[0]
            return opened
        if head is None or number <= head.journal:
            return None
        if head.broken is not None and line.entry[0] != "deleted":
            return None
        if head.broken is None:
            _check(line, head.num_entries)
        if line.entry[0] == "opened":
            raise Malformed("the session is there already")
        entry: Entry = unpack_entry(line.entry, head.running)
        return head, entry, None

    def _head(self, key: int) -> Head | None:
        if key not in self._by_key:
            self._by_key[key] = self._log.head_of_key(key)
        return self._by_key[key]

    def _lose(self, number: int, key: int) -> None:
        if not self._is_wanted(key):
            return
        head = self._head(key)
        if head is None:
            logger.error("row %d of the journal: the beginning of a session is lost", number)
        elif head.broken is None and number > head.journal:
            why = f"its entry in row {number} of the journal was altered"
            self._log.give_up(head, why, self._now_s)

    def _doubt(self, number: int) -> None:
        """Any session that ran before row ``number`` may miss an entry."""
        logger.error("rows of the journal before %d, or this one, cannot be read", number)
        keys = {*self._log.running_keys(), *self._by_key}
        found = (self._head(key) for key in keys if self._is_wanted(key))
        self._doubtful |= {head for head in found if head is not None and head.running is not None}


def _check(line: Line, number: int) -> None:
    if not line.is_entry(number):
        raise Malformed("the line was altered")


logger = logging.getLogger(__name__)


def without_refused(
    database: Database,
    refusals: tuple[type[Exception], ...],
    read: Callable[[Wanted], L],
    now_s: float,
) -> L:
    """The log after all of a journal that the database takes, in a transaction of the caller's.

    ``read`` reads the journal into a log that knows nothing yet, for the sessions that are
    wanted. Where the database refuses data (``refusals``), the sessions of the journal are
    halved until those at fault are alone: these are put into quarantine, and no others.
    """
    logger.error("reading the journal session by session")
    none = read(lambda key: False)

    def refused(keys: Sequence[int]) -> list[int]:
        """Brings the tables up to the journal for ``keys``; those for which that is refused."""
        if not keys:
            return []
        try:
            with database.savepoint():
                log = read(frozenset(keys).__contains__)
                tails = [head for head in log.heads.values() if head.tail]
                log.store_tails(tails, log.last_row, now_s)
                return []
        except refusals as error:
            if len(keys) == 1:
                name = none.quarantine(keys[0], brief(error))
                logger.error("session %s is in quarantine: %s", name, brief(error))
                return list(keys)
        half = len(keys) // 2
        return refused(keys[:half]) + refused(keys[half:])

    at_fault = frozenset(refused(sorted(none.keys_of_journal())))
    return read(lambda key: key not in at_fault)
