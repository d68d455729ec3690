"""Steps over what the database refuses of a journal: it costs the session it belongs to, no other.

A journal is read back as a whole. Where that fails for a reason that lies in the data, its
sessions are halved until those at fault are alone: these are put into quarantine, and from
then on `SessionBroken`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from server.store.errors import brief
from server.store.log import Log
from server.store.rows import Database

logger = logging.getLogger(__name__)

L = TypeVar("L", bound=Log)


@dataclass(frozen=True)
class Recovery(Generic[L]):
    """Reads a journal, within a transaction of the caller's.

    ``new_log`` makes a log that knows nothing yet, ``read`` reads the journal into it.
    ``refusals`` are the errors of the database that lie in the data.
    """

    database: Database
    refusals: tuple[type[Exception], ...]
    new_log: Callable[[], L]
    read: Callable[[L], None]
    now_s: float

    def run(self, sifts: bool) -> L:
        """The log after all that the database takes; it is tried as a whole unless it ``sifts``."""
        if not sifts:
            try:
                with self.database.savepoint():
                    return self._recovered(frozenset())
            except self.refusals as error:
                logger.error("the journal is read session by session: %s", brief(error))
        keys = sorted(self.new_log().keys_of_journal())
        return self._recovered(frozenset(self._sifted(keys)))

    def _recovered(self, skipped: frozenset[int]) -> L:
        log = self.new_log()
        log.is_wanted = lambda key: key not in skipped
        self.read(log)
        return log

    def _sifted(self, keys: Sequence[int]) -> list[int]:
        """Brings the tables up to the journal for ``keys``; those for which that is refused."""
        if not keys:
            return []
        try:
            with self.database.savepoint():
                self._store(keys)
        except self.refusals as error:
            if len(keys) == 1:
                self._quarantine(keys[0], error)
                return list(keys)
        else:
            return []
        half = len(keys) // 2
        return self._sifted(keys[:half]) + self._sifted(keys[half:])

    def _store(self, keys: Sequence[int]) -> None:
        log = self.new_log()
        log.is_wanted = frozenset(keys).__contains__
        self.read(log)
        log.store_tails([h for h in log.heads.values() if h.tail], log.last_row, self.now_s)

    def _quarantine(self, key: int, error: Exception) -> None:
        name = self.new_log().quarantine(key, brief(error))
        logger.error("session %s is in quarantine: %s", name, brief(error))
