"""The life of a kept session at one replica, as a table.

    ABSENT --load--> LOADING --held_elsewhere--> REMOTE
      ^ |               |  ^------handed_over-------'
      | open            | restore                restore_unfinished
      | v               v                             v
      | IDLE <--------- * --begin--> RUNNING --park--> PARKED
      |  | ^--------finish-------------'  ^--unpark-----'
      |  evict                                        evict
      '--- LEAVING <----------------------------------'

The engine's `SessionTable` and the `SessionLoader` change a stage by `after` alone, which knows no
other ways. What the store does with a session that is ABSENT here is not in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto


class Stage(Enum):
    """Where a kept session is, as one replica knows it."""

    ABSENT = auto()  # in the store alone, or nowhere
    LOADING = auto()  # a command waits for the store, or brings what it has loaded
    REMOTE = auto()  # a command waits for the replica that holds the session
    IDLE = auto()  # in the engine, without a request
    RUNNING = auto()  # in the engine, with a request that computes or waits for its turn
    PARKED = auto()  # in the engine, with a request that is paused
    LEAVING = auto()  # being written to the store, which releases it


class SessionEvent(Enum):
    """What happens to a kept session."""

    OPEN = auto()  # it is created, forked, imported, or cut back
    LOAD = auto()  # a command wants it
    FAIL = auto()  # it cannot be loaded
    HELD_ELSEWHERE = auto()  # another replica holds it
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


TRANSITIONS: Mapping[tuple[Stage, SessionEvent], Stage] = {
    (Stage.ABSENT, SessionEvent.OPEN): Stage.IDLE,
    (Stage.ABSENT, SessionEvent.LOAD): Stage.LOADING,
    (Stage.LOADING, SessionEvent.FAIL): Stage.ABSENT,
    (Stage.LOADING, SessionEvent.HELD_ELSEWHERE): Stage.REMOTE,
    (Stage.REMOTE, SessionEvent.HANDED_OVER): Stage.LOADING,
    (Stage.REMOTE, SessionEvent.FAIL): Stage.ABSENT,
    (Stage.LOADING, SessionEvent.RESTORE): Stage.IDLE,
    (Stage.LOADING, SessionEvent.RESTORE_UNFINISHED): Stage.PARKED,
    (Stage.IDLE, SessionEvent.BEGIN): Stage.RUNNING,
    (Stage.RUNNING, SessionEvent.PARK): Stage.PARKED,
    (Stage.PARKED, SessionEvent.UNPARK): Stage.RUNNING,
    (Stage.RUNNING, SessionEvent.FINISH): Stage.IDLE,
    (Stage.PARKED, SessionEvent.FINISH): Stage.IDLE,
    (Stage.IDLE, SessionEvent.EVICT): Stage.LEAVING,
    (Stage.PARKED, SessionEvent.EVICT): Stage.LEAVING,
    (Stage.LEAVING, SessionEvent.SAVED): Stage.ABSENT,
    (Stage.IDLE, SessionEvent.CLOSE): Stage.ABSENT,
}


def after(stage: Stage, event: SessionEvent) -> Stage:
    """The stage that follows. It is a fault of this program where the table has none."""
    assert (stage, event) in TRANSITIONS, f"{event.name} in {stage.name}"
    return TRANSITIONS[stage, event]
