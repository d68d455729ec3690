"""Where the thinking in a text begins and ends, by its markers, which tokens cut as they like."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from server.engine.detokenizer import overlap
from server.engine.types import Turn

#: White space that is withheld at most, in characters: longer runs are text like any other.
MAX_SPACE = 256


class TurnPhase(IntEnum):
    """Where a turn's text is. It only moves forward."""

    START = 0  # what has come may be the beginning of the begin marker
    OPENED = 1  # after the begin marker, before the first word of the thinking
    THINKING = 2
    CLOSED = 3  # after the end marker, before the first word of the answer
    ANSWER = 4  # before the first word of the answer that is shown
    SHOWN = 5


class Cut(NamedTuple):
    """A piece of text, cut. ``closed``: the end marker is in it; ``rest`` came right after it."""

    thought: str = ""
    answer: str = ""
    closed: bool = False
    rest: str = ""


class Thoughts:
    """Cuts a text as it comes. White space around the thinking is dropped.

    Of that after it, at most `MAX_SPACE` characters are: no more is withheld.

    ``lead`` is what the marker in the prompt lacks, and may come first; ``undecided`` is text
    that may belong to a marker, or be white space that is dropped.
    """

    def __init__(self, turn: Turn) -> None:
        self._begin, self._end = turn.begin, turn.end
        self.part = {"": TurnPhase.START, "open": TurnPhase.OPENED, "closed": TurnPhase.CLOSED}[
            turn.prompted
        ]
        self.lead, self.undecided = turn.lead, ""

    def push(self, text: str) -> Cut:
        """What ``text`` adds."""
        if self.part >= TurnPhase.ANSWER:
            return Cut(answer=text)
        self.undecided += text
        if self.lead and not self._has_led():
            return Cut()
        if self.part is TurnPhase.START:
            self._start()
        cut = self._think() if self.part in (TurnPhase.OPENED, TurnPhase.THINKING) else Cut()
        if self.part is TurnPhase.CLOSED:
            self.undecided = self.undecided.lstrip()
            if self.undecided:
                self.part = TurnPhase.ANSWER
        if self.part is TurnPhase.ANSWER:
            cut, self.undecided = cut._replace(answer=self.undecided), ""
        return cut

    def flush(self) -> Cut:
        """What was undecided, where nothing more comes."""
        text, self.undecided = self.undecided, ""
        if self.part in (TurnPhase.OPENED, TurnPhase.THINKING):
            return Cut(thought=_stripped(text))
        return Cut(answer=text) if self.part is TurnPhase.START else Cut()

    def _has_led(self) -> bool:
        """Drops the lead; False where it may still come."""
        if self.lead.startswith(self.undecided) and self.lead != self.undecided:
            return False
        self.undecided = self.undecided.removeprefix(self.lead)
        self.lead = ""
        return True

    def _start(self) -> None:
        """The model may write the begin marker itself, or answer at once."""
        text = self.undecided.lstrip()
        if len(self.undecided) - len(text) > MAX_SPACE:
            self.part = TurnPhase.ANSWER
        elif text.startswith(self._begin):
            self.part, self.undecided = TurnPhase.OPENED, text.removeprefix(self._begin)
        elif not self._begin.startswith(text) or "\n\n" in self.undecided:
            self.part = TurnPhase.ANSWER

    def _think(self) -> Cut:
        if self.part is TurnPhase.OPENED:
            self.undecided = self.undecided.lstrip()
            if self.undecided:
                self.part = TurnPhase.THINKING
        thought, found, rest = self.undecided.partition(self._end)
        if found:
            self.part, self.undecided = TurnPhase.CLOSED, rest
            return Cut(_stripped(thought), closed=True, rest=rest)
        safe = _stripped(thought[: len(thought) - overlap(thought, self._end)])
        self.undecided = thought[len(safe) :]
        return Cut(safe)


def _stripped(text: str) -> str:
    """``text`` without the white space at its end, of which at most `MAX_SPACE` is dropped."""
    return text[: max(len(text.rstrip()), len(text) - MAX_SPACE)]
