"""How much of something may be used in a minute: a bucket that fills steadily.

The generic cell rate algorithm: all that is kept is the moment at which the bucket
will be full again. Time is passed in.
"""

from __future__ import annotations

import math

PERIOD_S = 60.0
# Waits are stated in whole milliseconds; the margin is far above the error of the sums.
_MARGIN_S = 1e-6


class Bucket:
    """Holds one minute's worth and begins full. It may be emptied below zero: a debt."""

    def __init__(self) -> None:
        self._full_at_s = -math.inf

    def wait_s(self, now: float, per_minute: int) -> float:
        """Seconds until one unit is there, 0 where it is; after that wait it is there."""
        missing_s = max(0.0, self._full_at_s - now)
        wait_s = missing_s + PERIOD_S / per_minute - PERIOD_S
        if wait_s <= _MARGIN_S / 2:
            return 0.0
        return math.ceil((wait_s + _MARGIN_S) * 1000) / 1000

    def take(self, now: float, amount: int, per_minute: int) -> None:
        """Takes ``amount``, whether or not it is there."""
        self._full_at_s = max(self._full_at_s, now) + amount * PERIOD_S / per_minute
