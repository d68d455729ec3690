"""The life of a kept session at one replica, as a table.

    ABSENT --load--> LOADING --owned_elsewhere--> REMOTE
      ^ |               |  ^------handed_over-------'
      | open            | restore                restore_unfinished
      | v               v                             v
      | IDLE <--------- * --begin--> RUNNING --park--> PARKED
      |  | ^--------finish-------------'  ^--unpark-----'
      |  evict                                        evict
      '--- LEAVING <----------------------------------'

Each event has a row for each stage in which it may come. `SessionLoader` moves a session from
ABSENT to LOADING and REMOTE, the engine does the rest; a session in LOADING is handed from
one to the other. What the store does with a session that is ABSENT here is not in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple


class Stage(Enum):
    """Where a kept session is, as one replica knows it."""

    ABSENT = auto()  # in the store alone, or nowhere
    LOADING = auto()  # a command waits for the store, or brings what it has loaded
    REMOTE = auto()  # a command waits for the replica that owns the session
    IDLE = auto()  # in the engine, without a request
    RUNNING = auto()  # in the engine, with a request that computes or waits for its turn
    PARKED = auto()  # in the engine, with a request that is paused
    LEAVING = auto()  # being written to the store, which releases it


class SessionEvent(Enum):
    """What happens to a kept session."""

    OPEN = auto()  # it is created, forked, imported, or cut back
    LOAD = auto()  # a command wants it
    FAIL = auto()  # it cannot be loaded
    OWNED_ELSEWHERE = auto()  # another replica owns it
    HANDED_OVER = auto()  # that replica has released it
    RESTORE = auto()  # the engine has it again
    RESTORE_UNFINISHED = auto()  # the same, with the request that it ran
    BEGIN = auto()  # a request is accepted
    PARK = auto()  # its reader is slow or away
    UNPARK = auto()  # its reader has caught up, or its time without one begins
    FINISH = auto()  # the request has ended, was cancelled or has failed
    EVICT = auto()  # its room is needed, its time is over, or another replica asks for it
    SAVED = auto()  # its value is among the records for the store
    CLOSE = auto()  # it is deleted, replaced by a rewind, or discarded


class Transition(NamedTuple):
    """``function`` makes the move to ``stage``, and does what belongs to it."""

    stage: Stage
    function: str


_LOADER = "server/sessions/loader.py:SessionLoader"
_TABLE = "server/engine/sessions.py:SessionTable"
_KEEPER = "server/engine/keeper.py:Keeper"

TRANSITIONS: Mapping[tuple[Stage, SessionEvent], Transition] = {
    (Stage.ABSENT, SessionEvent.OPEN): Transition(Stage.IDLE, f"{_TABLE}.add"),
    (Stage.ABSENT, SessionEvent.LOAD): Transition(Stage.LOADING, f"{_LOADER}._load"),
    (Stage.LOADING, SessionEvent.FAIL): Transition(Stage.ABSENT, f"{_LOADER}._load"),
    (Stage.LOADING, SessionEvent.OWNED_ELSEWHERE): Transition(Stage.REMOTE, f"{_LOADER}._move"),
    (Stage.REMOTE, SessionEvent.HANDED_OVER): Transition(Stage.LOADING, f"{_LOADER}._move"),
    (Stage.REMOTE, SessionEvent.FAIL): Transition(Stage.ABSENT, f"{_LOADER}._load"),
    (Stage.LOADING, SessionEvent.RESTORE): Transition(Stage.IDLE, f"{_KEEPER}.restore"),
    (Stage.LOADING, SessionEvent.RESTORE_UNFINISHED): Transition(
        Stage.PARKED, f"{_KEEPER}.restore"
    ),
    (Stage.IDLE, SessionEvent.BEGIN): Transition(Stage.RUNNING, f"{_TABLE}.begin"),
    (Stage.RUNNING, SessionEvent.PARK): Transition(
        Stage.PARKED, "server/engine/round.py:Round.park"
    ),
    (Stage.PARKED, SessionEvent.UNPARK): Transition(
        Stage.RUNNING, "server/engine/engine.py:Engine.unpark"
    ),
    (Stage.RUNNING, SessionEvent.FINISH): Transition(Stage.IDLE, f"{_TABLE}.drop_request"),
    (Stage.PARKED, SessionEvent.FINISH): Transition(Stage.IDLE, f"{_TABLE}.drop_request"),
    (Stage.IDLE, SessionEvent.EVICT): Transition(Stage.LEAVING, f"{_KEEPER}.evict"),
    (Stage.PARKED, SessionEvent.EVICT): Transition(Stage.LEAVING, f"{_KEEPER}.evict"),
    (Stage.LEAVING, SessionEvent.SAVED): Transition(Stage.ABSENT, f"{_TABLE}.close"),
    (Stage.IDLE, SessionEvent.CLOSE): Transition(Stage.ABSENT, f"{_TABLE}.close"),
}


def next_stage(stage: Stage, event: SessionEvent) -> Stage:
    """Where ``event`` brings a session. Asserts that the table has it."""
    transition = TRANSITIONS.get((stage, event))
    assert transition is not None, f"{event.name} in {stage.name}"
    return transition.stage
