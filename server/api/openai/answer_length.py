"""How long an answer may become where the client does not say."""

from __future__ import annotations

from model.chat_template import PLAIN
from server.models.service import Service

#: Tokens of all choices of one answer, of a model that ends its answers by itself.
MAX_DEFAULT_TOKENS = 4096
MIN_DEFAULT_TOKENS = 256


def max_tokens_or_default(service: Service, wanted: int | None, num_choices: int = 1) -> int | None:
    """``wanted``, or a bound that is beyond the usual end of an answer; None for the server's.

    A model with a chat template of its own has learnt to end its answers. Without one
    it writes on until it is cut, and the default of every route is enough.
    """
    if wanted is not None or service.chat_template.source == PLAIN:
        return wanted
    room = max(MAX_DEFAULT_TOKENS // num_choices, MIN_DEFAULT_TOKENS)
    return min(room, service.limits.max_tokens)
