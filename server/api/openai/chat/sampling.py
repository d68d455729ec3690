"""How an answer to messages is drawn, and where it ends: by its length, a text or a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model.chat.template import PLAIN
from server.api.openai.chat.reasoning import Format, is_bound
from server.api.openai.chat.tools import ToolCallsFormat
from server.api.schemas.formats import TextFormat
from server.api.schemas.requests import Drawing, Sampling
from server.models.service import Service

#: Tokens of all choices of one answer, of a model that ends its answers by itself.
MAX_DEFAULT_TOKENS = 4096
MIN_DEFAULT_TOKENS = 256


def sampling_of(
    service: Service,
    body: Drawing,
    format: Format,
    max_tokens: int | None,
    with_logprobs: bool,
    num_choices: int = 1,
) -> Sampling:
    """The body's own, with what other routes call otherwise and what the template ends turns by."""
    given: dict[str, Any] = {name: getattr(body, name) for name in Drawing.model_fields}
    return Sampling.model_construct(
        **given
        | {
            "max_tokens": _max_tokens(service, max_tokens, num_choices),
            "top_logprobs": (body.top_logprobs or 0) if with_logprobs else None,
            "response_format": format,
            "stop": _stops(service, body.stop, format, bool(body.ignore_eos)),
            "stop_token_ids": _end_tokens(service, body.stop_token_ids, bool(body.ignore_eos)),
        }
    )


def _max_tokens(service: Service, wanted: int | None, num_choices: int) -> int | None:
    """``wanted``, or a bound that is beyond the usual end of an answer; None for the server's.

    A model with a chat template of its own has learnt to end its answers. Without one
    it writes on until it is cut, and the default of every route is enough.
    """
    if wanted is not None or service.chat_template.source == PLAIN:
        return wanted
    room = max(MAX_DEFAULT_TOKENS // num_choices, MIN_DEFAULT_TOKENS)
    return min(room, service.limits.max_tokens)


def _stops(
    service: Service, given: str | Sequence[str] | None, format: Format, ignore_eos: bool
) -> list[str] | None:
    """The strings that end an answer: the client's, and those that end the model's turns.

    Nothing but its end ends what has a format.
    """
    stops = [given] if isinstance(given, str) else list(given or ())
    may_be_text = isinstance(format, ToolCallsFormat) and isinstance(format.otherwise, TextFormat)
    if not ignore_eos and (may_be_text or not is_bound(format)):
        stops += [end for end in service.chat_template.turns.ends if end not in stops]
    return stops or None


def _end_tokens(service: Service, given: Sequence[int] | None, ignore_eos: bool) -> list[int]:
    """The tokens that end an answer: the template may end its turns by another than the model's."""
    ends = list(given or ())
    turn_ends = service.chat_template.special_tokens.get("eos_token", "")
    id = service.tokenizer.special_ids.get(turn_ends)
    return ends if id is None or ignore_eos or id in ends else [*ends, id]
