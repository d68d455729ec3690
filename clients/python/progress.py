"""How far the reader of a generation has read."""

from __future__ import annotations

from .events import Event, Finished, Resumed, Started, Token


class Progress:
    """The position of a reader.

    With ``session``, ``epoch`` and ``last_seq`` another client can `resume` after the
    last event that was read. They are None until the generation has begun.
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
        """Notes ``event`` and returns it if it is a `Token` or `Finished`."""
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
