"""When a replica does what is due for the store that it shares, from one connection to the next."""

from __future__ import annotations

import math
from itertools import islice

from server.store.clock import StoreClock
from server.store.postgres.link import SharedConnection
from server.store.postgres.upkeep import SharedUpkeep
from server.store.saving import StoreLimits

#: How often sessions are looked for that have not been used for long.
ROUND_S = 1.0
#: How often unused states are looked for.
SWEEP_S = 10.0
#: How often the bytes of all sessions are counted.
RARELY_S = 60.0
#: Sessions that are written and released in one transaction, after the engine has forgotten all.
RELEASED_AT_ONCE = 32


class Rounds:
    """``touched`` are the keys of the sessions that were used since the last `turn`.

    ``forgotten`` are sessions that the engine does not have any more and that this replica
    still holds. ``is_over``: the store has more bytes than it may.
    """

    def __init__(self, clock: StoreClock, limits: StoreLimits) -> None:
        self.is_over = False
        self.touched: set[int] = set()
        self.forgotten: set[str] = set()
        self._clock, self._limits = clock, limits
        self._round_s = self._sweep_s = self._rarely_s = -math.inf
        self._has_garbage = self._forgets = False

    def upkeep(self, connection: SharedConnection) -> SharedUpkeep:
        """What can be done on a connection."""
        return SharedUpkeep(connection, self._clock, self._limits)

    def turn(self, connection: SharedConnection, now_s: float) -> bool:
        """All that is due now; whether there is more to write."""
        upkeep = self.upkeep(connection)
        held = {head.key for head in connection.log.heads.values()}
        has_more = upkeep.run(self.touched & held)
        self.touched = set()
        if now_s - self._round_s >= ROUND_S:
            self._round_s = now_s
            upkeep.expire()
        if now_s - self._rarely_s >= RARELY_S:
            self._rarely_s = now_s
            self.is_over = upkeep.measure()
        if now_s - self._sweep_s >= SWEEP_S:
            self._sweep_s, self._has_garbage = now_s, True
        self._has_garbage = self._has_garbage and upkeep.take_out_garbage()
        self._release_forgotten(connection, upkeep)
        return has_more

    def forget(self, connection: SharedConnection | None) -> None:
        """The engine has forgotten all that this replica holds."""
        self._forgets = True
        if connection is not None:
            self.note_connection(connection)

    def note_connection(self, connection: SharedConnection) -> None:
        """What was forgotten while there was no connection is known with the next one."""
        if self._forgets:
            self.forgotten |= connection.log.heads.keys()
            self._forgets = False

    def _release_forgotten(self, connection: SharedConnection, upkeep: SharedUpkeep) -> None:
        """Some of them, so that no commit waits for all."""
        some = [*islice(self.forgotten, RELEASED_AT_ONCE)]
        heads = [head for id in some if (head := connection.log.head(id)) is not None]
        if heads:
            upkeep.release(heads)
        self.forgotten.difference_update(some)
