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
from server.store.redo import Wanted
from server.store.rows import Database

logger = logging.getLogger(__name__)

L = TypeVar("L", bound=Log)


@dataclass(frozen=True)
class Sifting(Generic[L]):
    """Reads a journal, within a transaction of the caller's.

    ``read`` reads it into a log that knows nothing yet, for the sessions that are wanted.
    ``refusals`` are the errors of the database that lie in the data.
    """

    database: Database
    refusals: tuple[type[Exception], ...]
    read: Callable[[Wanted], L]
    now_s: float

    def run(self) -> L:
        """The log after all that the database takes."""
        logger.error("reading the journal session by session")
        none = self.read(lambda key: False)
        refused = frozenset(self._refused(none, sorted(none.keys_of_journal())))
        return self.read(lambda key: key not in refused)

    def _refused(self, none: Log, keys: Sequence[int]) -> list[int]:
        """Brings the tables up to the journal for ``keys``; those for which that is refused."""
        if not keys:
            return []
        try:
            with self.database.savepoint():
                log = self.read(frozenset(keys).__contains__)
                tails = [head for head in log.heads.values() if head.tail]
                log.store_tails(tails, log.last_row, self.now_s)
        except self.refusals as error:
            if len(keys) == 1:
                name = none.quarantine(keys[0], brief(error))
                logger.error("session %s is in quarantine: %s", name, brief(error))
                return list(keys)
        else:
            return []
        half = len(keys) // 2
        return self._refused(none, keys[:half]) + self._refused(none, keys[half:])
