"""How many drafts pay: what a call of more rows takes, against the tokens that it may give."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

#: Rows of one stream whose calls are measured at start.
MEASURED_ROWS = (1, 2, 4, 8, 16)

#: Steps in which the part of drafts that are right is told apart.
_RATES = 64

LEAST_ROW = 0.02

#: By which the rate must grow for drafts to be made: less is within what the times vary.
MARGIN = 1.03


class DraftCosts:
    """Seconds of a call of ``rows[i]`` rows, ``times_s[i]``; between them they are interpolated.

    No row is taken to cost less than `LEAST_ROW` of a call of one: the times vary by more.
    ``keep_s`` is what a call takes longer that leaves the state before it, ``draft_s`` what it
    takes to make one draft.
    """

    def __init__(
        self,
        times_s: Sequence[float],
        keep_s: float = 0.0,
        rows: Sequence[int] = MEASURED_ROWS,
        draft_s: float = 0.0,
    ) -> None:
        self.rows = tuple(rows)
        least = [times_s[0] * (1 + LEAST_ROW * (number - 1)) for number in rows]
        self.times_s = tuple(accumulate(map(max, times_s, least), max))
        self.keep_s, self.draft_s = keep_s, draft_s
        self._known: dict[tuple[int, int, int, int], int] = {}

    def with_drafts_of(self, draft_s: float) -> DraftCosts:
        """The same where each draft takes so long to make."""
        return DraftCosts(self.times_s, self.keep_s, self.rows, draft_s)

    def call_s(self, num_rows: int) -> float:
        """What a call of ``num_rows`` takes; beyond what was measured, at the last slope."""
        upper = min(max(bisect_left(self.rows, num_rows), 1), len(self.rows) - 1)
        left, right = self.rows[upper - 1], self.rows[upper]
        slope = (self.times_s[upper] - self.times_s[upper - 1]) / (right - left)
        return self.times_s[upper - 1] + slope * (num_rows - left)

    def best_number(self, rate: float, limit: int, num_streams: int = 1, num_unfed: int = 0) -> int:
        """The number of drafts, up to ``limit``, with which a step gives most tokens per second.

        A draft is right with probability ``rate`` where those before it are. The step has a token
        of each of ``num_streams``, and ``num_unfed`` more are fed in any case. After a draft that
        is wrong the tokens taken are fed again, with the one before them.
        """
        key = int(rate * _RATES), limit, num_streams, num_unfed
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._best_number(key[0] / _RATES, *key[1:])
        return found

    def _best_number(self, rate: float, limit: int, num_streams: int, num_unfed: int) -> int:
        num_rows = num_streams + num_unfed
        alone_s = self.call_s(num_rows)
        row_s = self.call_s(num_rows + 1) - alone_s
        best, best_speed = 0, MARGIN * num_streams / alone_s
        num_right, all_right = 0.0, 1.0
        for number in range(1, limit + 1):
            all_right *= rate
            num_right += all_right
            again_s = row_s * (1 + num_right)
            seconds = self.call_s(num_rows + number) + self.keep_s + (1 - all_right) * again_s
            seconds += number * self.draft_s
            speed = (num_streams + num_right) / seconds
            if speed > best_speed:
                best, best_speed = number, speed
        return best

    def one_more_pays(
        self,
        rate: float,
        chance: float,
        num_drafts: int,
        num_streams: int = 1,
        num_unfed: int = 0,
    ) -> bool:
        """Whether one more draft than ``num_drafts`` pays, which are all right with ``chance``.

        It is right with probability ``rate`` then. The first one also pays for the state before.
        """
        num_rows = num_streams + num_unfed + num_drafts
        row_s = self.call_s(num_rows + 1) - self.call_s(num_rows)
        wrong_s = row_s * (1 + num_drafts)
        seconds = row_s + chance * (1 - rate) * wrong_s
        if not num_drafts:
            seconds += self.keep_s
        gained_s = chance * rate * self.call_s(num_streams + num_unfed) / num_streams
        return gained_s > MARGIN * seconds

    def ever_pays(self, limit: int) -> bool:
        """Whether drafts of one stream that are always right make it faster."""
        return self.best_number(1.0, limit) > 0
