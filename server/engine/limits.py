"""The limits of an engine, and whether a request can be done at all, whatever else runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from server.engine.drafts import Drafter
from server.engine.sampling import check_params
from server.engine.session import Matcher
from server.engine.text import check_tokens
from server.engine.types import Request
from server.errors import ContextExceeded, InvalidRequest

#: Bytes of requests for each of those that may run or wait, on average: some 40,000 ids.
REQUEST_BYTES = 1 << 19


@dataclass(frozen=True)
class EngineConfig:
    """Limits, all fixed at start. ``new_id`` names sessions: unguessable in production.

    ``max_asleep`` hibernated sessions fit next to the pool. With ``can_evict`` a store takes
    those that have been idle for longest, or for ``session_ttl_s``, or where the states of all
    have more than ``max_asleep_bytes``; otherwise those of ``session_ttl_s`` are deleted. A kept
    session is saved every ``save_interval`` tokens, and parks ``max_detached_tokens`` after its
    client has left. A prefix is offered to the cache's second tier at its use number
    ``min_prefix_uses``; up to ``max_evicted_prefixes`` wait for it, and as many that were evicted.
    ``matchers`` makes one of a grammar's text, at its beginning; without it grammars are refused.
    With a ``drafter`` a step may draw several tokens of a request; not on a runner that has a grid.
    """

    new_id: Callable[[], str]
    max_running: int = 256
    max_waiting: int = 1024
    max_asleep: int = 0
    max_asleep_bytes: float = math.inf
    session_ttl_s: float = 900.0
    can_evict: bool = False
    save_interval: int = 1024
    max_detached_tokens: int = 4096
    max_prefixes: int = 0
    max_prefix_bytes: float = math.inf
    max_evicted_prefixes: int = 0
    min_prefix_uses: int = 1
    matchers: Callable[[str], Matcher] | None = None
    drafter: Drafter | None = None

    @property
    def max_request_bytes(self) -> int:
        """Of all requests that have not ended; an owner may have half of them."""
        return (self.max_running + self.max_waiting) * REQUEST_BYTES


# -------------------------------------------------------------------------------------------------
# Whether a request can be done at all, whatever else runs.


#: As many of the most probable tokens as one may ask for.
MAX_TOP = 20


def check_request(request: Request, vocab_size: int, config: EngineConfig) -> None:
    """Raises `InvalidRequest` that names the field at fault."""
    params = request.sampling
    if params is not None:
        check_params(params, vocab_size)
    elif not request.tokens and not request.continuations:
        raise _refused(request.prompt_field, "must not be empty where nothing is generated")
    check_tokens(request.tokens, vocab_size, request.prompt_field)
    for tokens in request.continuations:
        check_tokens(tokens, vocab_size, "continuations")
    is_kept = request.keep or request.session is not None
    is_drawn = params is not None or request.score
    if params is not None and params.grammar is not None and config.matchers is None:
        raise _refused("grammar", "this server cannot follow one")
    if not 0 <= request.num_top <= MAX_TOP:
        raise _refused("num_top", f"must be in 0..{MAX_TOP}")
    if request.num_choices > 1 and is_kept:
        raise _refused("n", "must be 1 for a session that is kept; fork it")
    if request.continuations and (is_kept or is_drawn or request.num_choices > 1):
        raise _refused("continuations", "are only scored, on a session of their own")
    if request.embed and (is_kept or is_drawn or request.continuations):
        raise _refused("embed", "is all that can be asked of a text, on a session of its own")


def check_length(length: int, request: Request, longest: int) -> None:
    """Raises `ContextExceeded` where a text of ``length`` tokens has no room for the ``request``.

    ``longest`` is the greatest length. One token must have room that is to be generated.
    """
    added = max(map(len, request.continuations), default=0)
    wanted = length + len(request.tokens) + added + (request.sampling is not None)
    if wanted > longest:
        field = request.prompt_field
        raise ContextExceeded(
            f"{field}: the text would have {wanted} tokens, {length} of them before this request;"
            f" this server's context is {longest} (--context)",
            field,
        )


def check_loaded(length: int, longest: int | None) -> None:
    """Raises `ContextExceeded` for a session whose text has ``length`` tokens and does not fit.

    The last token of a text need not be fed.
    """
    if longest is not None and length > longest + 1:
        raise ContextExceeded(
            f"session: it has {length} tokens; this server's context is {longest} (--context)",
            "session",
        )


def _refused(field: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {rule}", field)
