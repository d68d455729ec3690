"""Clients that read their sessions to the end, at whichever replica has an ear for them.

They do what the client libraries do: a connection that is lost, or silent, is
left, and the session is resumed at another replica, from the last event on.
Unlike these they wander without need, and keep connections that fell silent, to
see what still comes from there.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, Protocol

from tests.chaos.record import Attachment, Recording
from tests.chaos.replicas import Replica
from tests.chaos.scripts import Script, Turn
from tests.chaos.waits import Waits
from tests.reliability.history import Event

#: Without an event for so long, a client looks elsewhere; an answer may take longer.
SILENCE_S = 1.5
ANSWER_S = 12.0
CONNECT_S = 2.0
#: A client's own buffer: small, so that a slow reader holds its server back.
RECEIVE_BYTES = 8192

#: What passes by itself, or at another replica.
PASSING = {
    "session_attached",
    "session_busy",
    "session_elsewhere",
    "key_in_use",
    "store_failed",
    "store_lost",
    "store_taken",
    "store_in_use",
    "migrated",
    "draining",
    "queue_full",
    "capacity_exhausted",
    "too_many_connections",
}


@dataclass
class Place:
    """How far a session has been read: what the next connection has to know."""

    client: str
    story: str
    script: Script
    chance: random.Random
    turn: int = 0
    first_seq: int = 0
    session: str | None = None
    epoch: str | None = None
    last_seq: int = 0
    is_begun: bool = False
    attachment: Attachment | None = None

    @property
    def key(self) -> str:
        return f"{self.story} turn {self.turn}"

    @property
    def body(self) -> dict[str, Any]:
        turn: Turn = self.script.turns[self.turn]
        return turn.body

    def next_turn(self) -> bool:
        """Whether there is one."""
        self.turn += 1
        self.first_seq, self.is_begun = self.last_seq, False
        return self.turn < len(self.script.turns)


#: How a connection ended for its session.
Outcome = Literal["finished", "lost", "broken", "refused", "silent", "migrate", "left", "reset"]


class Reader(Protocol):
    """Reads on over one connection, however that is done."""

    async def read(self, place: Place, replica: Replica, take_over: bool) -> Outcome: ...


@dataclass
class World:
    """What all clients of a run share. ``num_losses`` rises before and after a store is lost."""

    replicas: Sequence[Replica]
    recording: Recording
    waits: Waits
    codes: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    num_losses: int = 0
    num_finished: int = 0
    finished: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    is_ending: bool = False
    readers: dict[str, Place] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    def refused(self, place: Place, error: dict[str, Any], replica: str) -> Outcome:
        """How an error of the protocol ends a connection. One that no fault explains is wrong."""
        code = error.get("code", "none")
        if code == "session_not_found" and not place.is_begun and place.session is not None:
            return "lost"  # a generate has no cursor that could be reset
        self.codes[code] = self.codes.get(code, 0) + 1
        if code not in PASSING:
            said = error.get("message", "")
            self.wrong(place, "error", f"was answered by {replica} with {code}: {said}")
        return "refused"

    def reset(self, place: Place, frame: dict[str, Any]) -> Outcome:
        """A reset is of a lost store: another history, in which the session has never been."""
        if frame["epoch"].rpartition("-")[0] == str(place.epoch).rpartition("-")[0]:
            self.wrong(place, "reset", f"the store is the same: {frame}")
        return "reset"

    def migrated(self, place: Place, attachment: Attachment | None) -> Outcome:
        """The replica drains."""
        self.waits.struck("drain", place.client, attachment, self.clock())
        return "migrate"

    def check_place(self, place: Place, frame: dict[str, Any]) -> None:
        """A connection goes on where its client was."""
        if frame["seq"] != place.last_seq:
            self.wrong(place, "other place", f"{frame['type']} at event {frame['seq']}")

    def wrong(self, place: Place, kind: str, detail: str) -> None:
        self.recording.note(
            kind,
            str(place.session),
            str(place.epoch),
            place.last_seq,
            f"{place.client}, {place.key}",
            detail,
        )

    def attached(
        self, place: Place, replica: str, session: str, epoch: str, log_end: int, asked_s: float
    ) -> Attachment:
        """The connection reads the session, from the place on."""
        if place.session not in (None, session):
            self.wrong(place, "other session", f"was given {session}")
        if place.epoch not in (None, epoch):
            self.wrong(place, "silent epoch", f"goes on in epoch {epoch} without a reset")
        place.session, place.epoch, place.is_begun = session, epoch, True
        self.recording.scripts[session] = place.script.index
        place.attachment = self.recording.attach(
            place.client, session, epoch, replica, place.last_seq, log_end, asked_s
        )
        return place.attachment

    def saw(self, place: Place, attachment: Attachment, event: Event) -> None:
        """An event of the connection that the client reads."""
        self.recording.saw(attachment, event)
        self.waits.event(place.client, attachment, self.clock())
        place.last_seq = event.seq


class Client:
    """Plays one script after the other until the run ends, and the last one to its end."""

    def __init__(
        self, name: str, world: World, reader: Reader, scripts: Sequence[Script], seed: str
    ) -> None:
        self.name = name
        self._world, self._reader, self._scripts = world, reader, scripts
        self._chance = random.Random(seed)

    async def run(self) -> None:
        for number in count():
            if self._world.is_ending:
                return
            script = self._chance.choice(self._scripts)
            await self._play(Place(self.name, f"{self.name} story {number}", script, self._chance))
            await asyncio.sleep(self._chance.uniform(0, 0.5))

    async def _play(self, place: Place) -> None:
        world = self._world
        num_losses = world.num_losses
        world.readers[self.name] = place
        try:
            while True:
                outcome = await self._turn(place)
                if outcome == "lost":
                    if world.num_losses == num_losses:
                        world.wrong(place, "lost session", "no store was lost, the session was")
                    elif place.session is not None:
                        world.lost.add(place.session)
                    return
                if not place.next_turn():
                    break
        finally:
            del world.readers[self.name]
            world.waits.left(self.name)
        assert place.session is not None
        world.finished.add(place.session)
        world.num_finished += 1

    async def _turn(self, place: Place) -> Literal["finished", "lost"]:
        """One generation, over as many connections as it takes."""
        replica: Replica | None = None
        delay_s, take_over = 0.05, False
        while True:
            replica = self._another_than(replica)
            before = place.last_seq
            outcome = await self._reader.read(place, replica, take_over)
            self._world.outcomes[outcome] = self._world.outcomes.get(outcome, 0) + 1
            if outcome == "finished":
                return "finished"
            if outcome in ("lost", "reset"):
                return "lost"
            # The replica that was asked may not know that we have left.
            take_over = place.is_begun and (outcome in ("silent", "left") or take_over)
            if outcome == "refused":
                take_over = place.is_begun and self._chance.random() < 0.5
            delay_s = 0.05 if place.last_seq > before else min(1.0, delay_s * 2)
            await asyncio.sleep(delay_s * self._chance.uniform(0.5, 1.0))

    def _another_than(self, replica: Replica | None) -> Replica:
        others = [one for one in self._world.replicas if one is not replica and one.is_up]
        others = others or [one for one in self._world.replicas if one is not replica]
        return self._chance.choice(others or list(self._world.replicas))
