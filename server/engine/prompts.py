"""Prompts that are fed once for several requests: from the prefix cache, and to branches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from server.engine.live import Live
from server.engine.prefix import Prefix, PrefixHandle, PrefixNotFound, keys
from server.engine.prefix_cache import PrefixCache, boundaries
from server.engine.sampling import MAX_SEED
from server.engine.sessions import SessionTable
from server.engine.token_ids import TokenArray
from server.engine.types import Request
from server.engine.value import SessionValue, StateBlock


class Prompts:
    """Takes what is known of a prompt from ``prefixes``, and leaves there what is worth it."""

    def __init__(
        self, sessions: SessionTable, prefixes: PrefixCache | None, grid: tuple[int, ...]
    ) -> None:
        self._sessions, self._prefixes, self._grid = sessions, prefixes, grid

    def start_of(self, owner: str, handle: str) -> SessionValue:
        """What a session begins with that continues the prompt that ``handle`` names.

        Raises `InvalidRequest` and `PrefixNotFound`.
        """
        named = PrefixHandle.parse(handle)
        prefix = None if self._prefixes is None else self._prefixes.find(owner, named.key)
        if prefix is None:
            raise PrefixNotFound
        return named.start(prefix)

    def expect(self, live: Live, prompt: Sequence[int]) -> None:
        """Notes where the prompt of a new session will be worth keeping, or be copied.

        What a named state or a prefix leaves unread, its last token, is the first of that prompt.
        """
        session = live.session
        if live.alone:
            live.prompt = prompt
            return
        if not session.is_new:
            return
        live.prompt_at = start = session.position
        prompt = TokenArray.joined(session.next(session.length - start), prompt)
        if self._prefixes is not None:
            before = len(prompt) - len(live.request.tokens)
            asked = [before + count for count in live.request.cache_at]
            found = boundaries(len(prompt), self._grid, start, asked)
            live.cached_at = tuple(start + count for count in found)
        copied_at = (start + len(prompt) - 1,) if live.request.num_choices > 1 else ()
        places = {*live.cached_at, *copied_at}
        live.boundaries = deque(sorted(place for place in places if place > start))
        live.prompt = prompt if live.cached_at else ()

    def skip_cached(self, live: Live) -> None:
        """Takes the state of the longest prefix that is known, instead of feeding it."""
        if self._prefixes is None or not live.cached_at:
            return
        session = live.session
        hit = self._prefixes.lookup(live.owner, live.prompt, session.origin_digest)
        if hit is None:
            return
        self._sessions.put(session, hit.block)
        session.advance(live.prompt[: hit.num_tokens])
        live.num_cached = hit.num_tokens
        self._name(live, hit)
        while live.boundaries and live.boundaries[0] <= session.position:
            live.boundaries.popleft()
        self._drop_read_prompt(live)

    def reach_boundary(self, live: Live) -> None:
        """The prompt has been fed up to one of its boundaries, or beyond."""
        session = live.session
        place = live.boundaries.popleft()
        if place == session.position and place in live.cached_at:
            state = self._sessions.state_of(session)
            assert state is not None and self._prefixes is not None
            if self._sessions.is_finite(state):
                self._keep(live, place, state)
        self._drop_read_prompt(live)

    def _keep(self, live: Live, place: int, state: StateBlock) -> None:
        """The cache takes ``state``, which has seen the text up to ``place``."""
        session = live.session
        num_read = place - live.prompt_at
        continued = live.num_cached if place == live.cached_at[-1] else 0
        lengths = (*((continued,) if continued else ()), num_read)
        *earlier, key = keys(live.owner, live.prompt, lengths, session.origin_digest)
        prefix = Prefix(key, num_read, state, place, tuple(session.recent))
        assert self._prefixes is not None
        if self._prefixes.insert(live.owner, prefix, earlier[0] if earlier else None):
            self._name(live, prefix)

    def _name(self, live: Live, prefix: Prefix) -> None:
        """Notes the handle of a prompt that ``prefix`` is the last state of."""
        if live.request.return_prefix and prefix.position >= live.cached_at[-1]:
            live.prefix = str(PrefixHandle(prefix.key, live.prompt[prefix.num_tokens :]))

    def _drop_read_prompt(self, live: Live) -> None:
        if not live.boundaries:
            live.prompt = ()


def branches(request: Request) -> list[Request]:
    """What is to be done once the prompt has been fed, by the session and by copies of it."""
    if request.continuations:
        return [
            replace(
                request,
                request_id=id,
                tokens=tokens,
                continuations=(),
                score=True,
            )
            for id, tokens in zip(request.ids, request.continuations, strict=True)
        ]
    params = request.sampling
    assert params is not None, request
    return [
        replace(
            request,
            request_id=id,
            tokens=(),
            num_choices=1,
            score=False,
            sampling=replace(params, seed=(params.seed + index) & MAX_SEED),
        )
        for index, id in enumerate(request.ids)
    ]
