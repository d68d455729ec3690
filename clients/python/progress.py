"""How far a generation has come, as its reader sees it."""

from __future__ import annotations

from .events import Event, Finished, Resumed, Started, Token


class Progress:
    """``session``, ``epoch`` and ``last_seq`` are what `resume` wants.

    With them another client continues after the last event that was read. They are
    None until the generation has begun.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.session: str | None = None
        self.epoch: str | None = None
        self.last_seq: int | None = None
        self.started: Started | None = None
        self.resumed: Resumed | None = None
        self.finished: Finished | None = None

    def _note(self, event: Event) -> Token | Finished | None:
        """Remembers ``event`` and gives it back if it has text to show."""
        if isinstance(event, Started | Resumed):
            self.session, self.epoch = event.session, event.epoch
        if isinstance(event, Started):
            self.started, self.last_seq = event, event.seq
        elif isinstance(event, Resumed):
            self.resumed, self.last_seq = event, event.seq
        elif isinstance(event, Token | Finished):
            self.last_seq = event.seq
            if isinstance(event, Finished):
                self.finished = event
            return event
        return None
