"""The text of one turn of a chat: what the model thinks first, and its answer, told apart.

Only a request with a `Turn` is read like this; the text of all others is shown as it comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from server.engine.detokenizer import StopStrings
from server.engine.thoughts import Thoughts, TurnPhase
from server.engine.types import Turn


class TurnState(NamedTuple):
    """What a `TurnText` needs to continue: see `Thoughts` for the first three.

    ``withheld`` and ``answer_withheld`` are what stop strings hold back. ``forced`` tokens come
    next, whatever the model would draw. ``num_thought`` tokens were thinking; 0 while it continues.
    """

    part: int
    lead: str = ""
    undecided: str = ""
    withheld: str = ""
    answer_withheld: str = ""
    forced: tuple[int, ...] = ()
    num_thought: int = 0


class ShownText(NamedTuple):
    """What became safe to show: of the thinking, None where that is over, and of the answer."""

    thought: str | None
    text: str
    met_stop: bool = False


class TurnText:
    """Reads the text of a turn, token by token.

    ``stop`` are the strings that end the answer. Where a ``grammar`` is waiting, it begins to
    apply when this `is_thinking` no more, and what came before it is not shown as the answer.
    """

    def __init__(self, turn: Turn, stop: tuple[str, ...], grammar: bool) -> None:
        self._turn, self._grammar = turn, grammar
        self._before, self._answer = StopStrings(turn.stop), StopStrings(stop)
        self._thoughts = Thoughts(turn)
        self._forced: tuple[int, ...] = ()
        self._num_drawn = self._num_thought = 0

    @property
    def state(self) -> TurnState:
        """For `restore`."""
        thoughts = self._thoughts
        held = (self._before.withheld, self._answer.withheld)
        place = (thoughts.part.value, thoughts.lead, thoughts.undecided)
        return TurnState(*place, *held, self._forced, self._num_thought)

    def restore(self, state: TurnState, num_drawn: int) -> None:
        """Continues where another one was after ``num_drawn`` tokens."""
        thoughts = self._thoughts
        thoughts.part, thoughts.lead = TurnPhase(state.part), state.lead
        thoughts.undecided = state.undecided
        self._before.restore(state.withheld)
        self._answer.restore(state.answer_withheld)
        self._forced, self._num_thought = state.forced, state.num_thought
        self._num_drawn = num_drawn

    @property
    def is_thinking(self) -> bool:
        """Whether the thinking continues, or what is forced after it."""
        return self._thoughts.part < TurnPhase.CLOSED or bool(self._forced)

    @property
    def is_within_thinking(self) -> bool:
        """Whether the text is between the two markers."""
        return self._thoughts.part in (TurnPhase.OPENED, TurnPhase.THINKING)

    @property
    def awaits_answer(self) -> bool:
        """Whether the thinking continues, or nothing but white space has come since."""
        return self.is_within_thinking or self._thoughts.part is TurnPhase.CLOSED

    @property
    def num_unrestricted(self) -> int | None:
        """The next tokens for which `allowed` gives no mask, whatever they are; None: all."""
        if self._forced or (self._grammar and self.is_thinking):
            return 0
        if self._turn.budget is None or self._thoughts.part >= TurnPhase.CLOSED:
            return None
        return max(0, self._turn.budget - self._num_drawn)

    @property
    def num_thought(self) -> int:
        """Tokens drawn for the thinking, with its markers."""
        return self._num_drawn if self.is_within_thinking else self._num_thought

    def allowed(self, vocab_size: int, ends: Iterable[int]) -> npt.NDArray[np.uint32] | None:
        """The mask of the tokens that may come next, [words]; None where any may.

        Where a grammar is waiting, none of ``ends`` may end the text before it.
        """
        self._force_in_time()
        waits = self._grammar and self.is_thinking
        if not self._forced and not waits:
            return None
        mask = np.zeros(-(-vocab_size // 32), np.uint32)
        if self._forced:
            mask[self._forced[0] // 32] = np.uint32(1 << self._forced[0] % 32)
            return mask
        mask = ~mask
        for id in ends:
            mask[id // 32] &= ~np.uint32(1 << id % 32)
        return mask

    def push(self, text: str) -> ShownText:
        """What the next token makes safe to show; ``text`` is its text."""
        self._force_in_time()
        self._num_drawn += 1
        self._forced = self._forced[1:]
        safe, met = text, False
        if self._thoughts.part < TurnPhase.ANSWER:
            safe, met = self._before.push(text)
        cut = self._thoughts.push(safe)
        answer = cut.answer
        if self._thoughts.part >= TurnPhase.ANSWER:
            answer += self._before.flush()
        if cut.closed:
            self._num_thought = self._num_drawn
            if self._grammar:
                answer = ""
                if not cut.rest and not self._forced:
                    self._forced = self._turn.gap
        shown, met_answer = self._shown(answer)
        is_over = self._thoughts.part >= TurnPhase.ANSWER
        thought = None if is_over and not cut.thought else cut.thought
        return ShownText(thought, shown, met or met_answer)

    def finish(self, met_stop: bool, text: str = "") -> ShownText:
        """What was held back: of the answer only where no stop string was met; ``text`` is last."""
        safe = "" if met_stop else self._before.flush() + text
        cuts = self._thoughts.push(safe), self._thoughts.flush()
        thought = "".join(cut.thought for cut in cuts)
        if met_stop:
            return ShownText(thought, "")
        if self._thoughts.part is TurnPhase.START:
            self._thoughts.part = TurnPhase.ANSWER
        shown, met = self._shown("".join(cut.answer for cut in cuts))
        return ShownText(
            thought, shown + ("" if met else self._stripped(self._answer.flush())), met
        )

    def _force_in_time(self) -> None:
        """Closes the thinking where its budget is used up."""
        budget = self._turn.budget
        if budget is None or self._forced or not self.is_within_thinking:
            return
        if self._num_drawn >= budget:
            self._forced = self._turn.close

    def _shown(self, answer: str) -> tuple[str, bool]:
        """What of the answer may be shown now, and whether a stop string was met."""
        if not answer:
            return "", False
        safe, met = self._answer.push(answer)
        return self._stripped(safe), met

    def _stripped(self, text: str) -> str:
        """``text`` without the white space that the answer begins with."""
        if self._thoughts.part is TurnPhase.SHOWN:
            return text
        text = text.lstrip()
        if text:
            self._thoughts.part = TurnPhase.SHOWN
        return text
