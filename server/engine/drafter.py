"""What proposes tokens before they are drawn, so that one reading of the weights checks several.

A draw depends on the seed and the position alone, so a draft is right exactly if it is what is
drawn in its place: whatever a drafter proposes, the text is the same to the bit, and only the
number of steps changes (Leviathan et al. 2023, "Fast inference from transformers via speculative
decoding"; without their rejection step, which is for draws that cannot be repeated).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from server.engine.live import Live
from server.engine.runner import Mask


class Proposal(NamedTuple):
    """Tokens that may follow a session's text, of which ``number`` are to be fed.

    Under a grammar ``number`` is how many `Drafter.next_draft` may find. ``source`` says what made
    them: the text that is known, or a model.
    """

    tokens: Sequence[int]
    number: int
    source: Literal["text", "model"] = "text"


NO_DRAFTS = Proposal((), 0)


class Drafter(Protocol):
    """Proposes the next tokens of a request. The engine's thread owns it.

    ``max_drafts``: no more are proposed for one row, of drafts and tokens that
    earlier drafts have left unfed together. While more than ``max_streams`` requests run
    it is not asked.
    """

    @property
    def max_drafts(self) -> int: ...

    @property
    def max_streams(self) -> int: ...

    def propose(self, live: Live, limit: int, num_running: int) -> Proposal:
        """At most ``limit`` drafts, best guess. ``num_running`` requests share the step."""

    def next_draft(self, live: Live, taken: Sequence[int], mask: Mask) -> int | None:
        """The draft after those ``taken`` of a text under a grammar, which allows ``mask`` there.

        None where there is none that the grammar allows.
        """
