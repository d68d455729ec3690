"""What clients saw, as it came: every connection to a session, and what was wrong at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.reliability.history import Event, History, Problem, Reader


@dataclass
class Attachment:
    """One connection that reads a session.

    ``replica`` is the process at the other end. ``after_seq`` is what the client
    had, and ``log_end`` the last event that there was when the replica began to
    answer: what comes after it, the replica has made itself. ``asked_s`` and
    ``answered_s`` are on the clients' clock.
    """

    name: str
    session: str
    epoch: str
    replica: str
    after_seq: int
    log_end: int
    asked_s: float
    answered_s: float
    reader: Reader
    last_seq: int = 0
    last_s: float = 0.0

    def saw(self, event: Event, now_s: float) -> None:
        self.reader.saw(event)
        self.last_seq, self.last_s = event.seq, now_s


@dataclass
class Recording:
    """Everything of a run. ``scripts`` says which script each session follows."""

    history: History = field(default_factory=History)
    attachments: list[Attachment] = field(default_factory=list)
    wrong: list[Problem] = field(default_factory=list)
    scripts: dict[str, int] = field(default_factory=dict)
    num_events: int = 0
    clock: Callable[[], float] = time.monotonic

    def attach(
        self,
        client: str,
        session: str,
        epoch: str,
        replica: str,
        after_seq: int,
        log_end: int,
        asked_s: float,
    ) -> Attachment:
        """A connection has been answered."""
        name = f"{client}, connection {len(self.attachments)}"
        reader = self.history.reader(name, session)
        reader.attach(epoch, after_seq, replica)
        attachment = Attachment(
            name, session, epoch, replica, after_seq, log_end, asked_s, self.clock(), reader
        )
        self.attachments.append(attachment)
        return attachment

    def saw(self, attachment: Attachment, event: Event) -> None:
        self.num_events += 1
        attachment.saw(event, self.clock())

    def note(self, kind: str, session: str, epoch: str, seq: int, reader: str, detail: str) -> None:
        """Something that must not be, whatever comes."""
        self.wrong.append(Problem(kind, session, epoch, seq, reader, detail))
