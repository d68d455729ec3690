"""What the engine needs of whatever reads a grammar: where its tokens may continue.

The engine never looks inside. A session keeps the grammar's text and the tokens
generated under it, from which a matcher can be built again anywhere.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class Matcher(Protocol):
    """A place in the texts of one grammar. The engine's thread owns it."""

    def allowed(self, budget: int) -> npt.NDArray[np.uint32]:
        """Which tokens may come: bit ``i % 32`` of word ``i // 32`` for token ``i``.

        Padded to whole words. The end-of-text token's bit is set exactly where the
        text may end. At most ``budget`` tokens will come in all, so that it can see
        to it that the text is complete by then.
        """

    def accept(self, token: int) -> None:
        """Continues by ``token``. Raises `RequestError` where it is not allowed."""

    def is_over(self) -> bool:
        """Whether nothing but the end may follow."""

    #: Seconds that the last token took to compute: its mask, and to continue by it.
    cost_s: float

    def copy(self) -> Matcher:
        """Another one at this place, that continues by itself."""
