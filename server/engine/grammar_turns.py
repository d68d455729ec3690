"""How much of a step grammars may take: where they take more, their rows continue in turn.

The mask of a client's grammar takes some microseconds, or some tens of milliseconds: of all
running requests together that would be seconds, for which every other request waits. Matchers
measure what they take. In which step a row gets its token changes no token.
"""

from __future__ import annotations

from collections import deque

from server.engine.live import Live
from server.engine.scheduler import Row

#: Of a step, for all rows under grammars; one row continues in any case.
BUDGET_S = 0.03

Plan = list[Row[Live]]


class GrammarTurns:
    """Chooses the rows of a step. Owners take turns, and the requests of an owner do."""

    def __init__(self) -> None:
        self._num_chosen = 0
        self._last: dict[str, int] = {}  # when each owner had its last turn

    def choose(self, plan: Plan, running: dict[Live, None]) -> Plan:
        """``plan`` without the rows for which this step has no time.

        Those that are in it go to the back of ``running``.
        """
        costs = {row[0]: _cost_s(row) for row in plan if _wants_mask(row)}
        if sum(costs.values()) <= BUDGET_S:
            return plan
        chosen = self._in_turn(costs)
        for live in chosen:
            del running[live]
            running[live] = None
        return [row for row in plan if row[0] not in costs or row[0] in chosen]

    def _in_turn(self, costs: dict[Live, float]) -> set[Live]:
        queues: dict[str, deque[Live]] = {}
        for live in costs:
            queues.setdefault(live.owner, deque()).append(live)
        self._last = {owner: self._last.get(owner, 0) for owner in queues}
        chosen: set[Live] = set()
        spent_s = 0.0
        while queues:
            owner = min(queues, key=self._last.__getitem__)
            live = queues[owner].popleft()
            spent_s += costs[live]
            if chosen and spent_s > BUDGET_S:
                break
            chosen.add(live)
            self._num_chosen += 1
            self._last[owner] = self._num_chosen
            if not queues[owner]:
                del queues[owner]
        return chosen


def _wants_mask(row: Row[Live]) -> bool:
    live, num_tokens, _ = row
    session = live.session
    if session.constraint is None or live.draw is None:
        return False
    return num_tokens > session.num_unfed


def _cost_s(row: Row[Live]) -> float:
    """One mask for each draw."""
    live, _, num_drafts = row
    constraint = live.session.constraint
    assert constraint is not None, row
    return constraint.cost_s + num_drafts * constraint.draft_cost_s
