"""What proposes tokens before they are drawn, so that one reading of the weights checks several.

A draw depends on the seed and the position alone, so a draft is right exactly if it is what is
drawn in its place: whatever a drafter proposes, the text is the same to the bit, and only the
number of steps changes (Leviathan et al. 2023, "Fast inference from transformers via speculative
decoding"; without their rejection step, which is for draws that cannot be repeated).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from server.engine.session import Session
from server.engine.types import Request


class Drafter(Protocol):
    """Proposes the next tokens of a session. The engine's thread owns it.

    ``max_drafts``: no more are proposed for one row, of drafts and tokens that
    earlier drafts have left unfed together.
    """

    @property
    def max_drafts(self) -> int: ...

    def propose(self, request: Request, session: Session, limit: int) -> Sequence[int]:
        """At most ``limit`` tokens that may follow the session's text, best guess; or none."""
