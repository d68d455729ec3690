"""Drafts from a session's own past, its prompt, a client's prediction, and a grammar.

How many are made follows from what calls of more rows take and from how often such drafts have
been right in this stream. For that no draft needs to be fed: what would have been proposed is
compared with what was drawn, so that a text without repetitions costs nothing but the look-ups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from server.engine.draft_choices import Choices, place_of
from server.engine.draft_costs import DraftCosts
from server.engine.drafter import NO_DRAFTS, Proposal
from server.engine.live import Live
from server.engine.runner import Mask
from server.engine.session import Session
from server.engine.suffix_index import SuffixIndex
from server.engine.token_ids import TokenArray

#: Rows of one call that are one stream's, but for the one that it has without drafts.
MAX_DRAFTS = 15

#: With more streams a call takes as long as its rows do: drafts would take from the others.
MAX_STREAMS = 8

#: Indexes that are kept, of the sessions that were last asked for: a few megabytes.
MAX_INDEXES = 64

#: Lengths of a match from which its drafts are counted apart, and how often the drafts of such a
#: match are taken to be right before any was seen.
KINDS = ((0, 0.2), (5, 0.5), (10, 0.8))

#: Kinds of drafts under a grammar. It leaves one token; or much, and the last token of the place is
#: meant, whose rate is that of the place; or it leaves one text; or much, where the text has been
#: before, or what came after the same token. How often the last three are taken to be right.
CERTAIN, AGAIN, FORCED, FREE, AFTER = -2, -1, len(KINDS), len(KINDS) + 1, len(KINDS) + 2
FORCED_RATE, FREE_RATE, AFTER_RATE = 0.9, 0.2, 0.2

#: Seconds that the masks of one row's drafts may take.
MASKS_S = 0.005
#: No clock tells less apart.
CLOCK_S = 1e-9

#: A text is not forced where more tokens may come than those that begin it.
MAX_FORCED_IDS = 16

#: The part that one more draft has in how often drafts of its kind were right.
LEARNING_RATE = 1 / 16

#: Tokens of a prompt after which a predicted answer is filed.
LEAD_TOKENS = 32

#: The most tokens for which a text that repeats nothing is not looked up again. A look-up takes
#: longer in a step than in a loop: the weights have displaced the index from the caches.
MAX_REST = 8

#: The tokens that a grammar allows somewhere, where they are few.
Ids = tuple[int, ...]


class Guess(NamedTuple):
    """A token that may come next, None where nothing is known; under a grammar also where.

    ``place`` is `place_of` the mask there, and ``before`` the token before it.
    """

    token: int | None
    kind: int
    place: int | None = None
    before: int = 0


class Stream:
    """What is known of one session's text: ``length`` tokens of it are in the index.

    ``rates`` says how often drafts were right, by their kind: those of `KINDS`, then `FORCED`,
    `FREE` and `AFTER`. ``num_streams`` share its steps. Its text is not looked up before it has
    ``rests_until`` tokens: after each look-up without use the ``rest`` is a token longer.
    """

    def __init__(self) -> None:
        self.index = SuffixIndex()
        self.length = 0
        self.epoch = 0
        self.guess: list[Guess] = []  # the next tokens
        self.choices = Choices()
        self.kind = 0
        self.rates = [rate for _, rate in KINDS] + [FORCED_RATE, FREE_RATE, AFTER_RATE]
        self.num_streams = 1
        self.rest = self.rests_until = 0
        self.chance = 1.0  # that all drafts of the row are right, as far as there are any

    def read(self, tokens: Sequence[int]) -> None:
        """The text continues by ``tokens``; the last guess is compared with them."""
        for guess, token in zip(self.guess, tokens, strict=False):
            is_right = guess.token == token
            if guess.place is not None:
                self.choices.learn(guess.place, guess.before, token)
            if guess.token is not None and guess.kind >= 0:
                self.rates[guess.kind] += LEARNING_RATE * (is_right - self.rates[guess.kind])
            if not is_right:
                break
        self.guess = []
        self.index.extend(tokens)

    def find(self, limit: int) -> list[int]:
        """The next tokens as they followed before."""
        place, length = self.index.find()
        if not length:
            return []
        self.kind = sum(length >= least for least, _ in KINDS) - 1
        return self.index.following(place, limit)


class SuffixDrafter:
    """See `server.engine.drafter.Drafter`. ``costs`` are those of the runner.

    ``token_bytes`` gives what a token stands for.
    """

    max_drafts = MAX_DRAFTS
    max_streams = MAX_STREAMS

    def __init__(self, costs: DraftCosts, token_bytes: Callable[[int], bytes]) -> None:
        self.costs, self._token_bytes = costs, token_bytes
        self._streams: WeakKeyDictionary[Session, Stream] = WeakKeyDictionary()

    def propose(self, live: Live, limit: int, num_running: int) -> Proposal:
        if not live.request.speculation:
            return NO_DRAFTS
        session = live.session
        stream = self._stream(session)
        if session.constraint is None and session.length < stream.rests_until:
            return NO_DRAFTS
        if stream.length != session.length:
            _catch_up(stream, live)
        found, stream.num_streams = stream.find(self.max_drafts), num_running
        if session.constraint is not None:  # its guess is made draft by draft
            most = max(1, int(MASKS_S / max(session.constraint.draft_cost_s, CLOCK_S)))
            return Proposal(found, min(limit, most))
        stream.guess = [Guess(token, stream.kind) for token in found]
        rate, num_unfed = stream.rates[stream.kind], session.num_unfed
        number = self.costs.best_number(rate, limit, num_running, num_unfed) if found else 0
        stream.rest = 0 if number else min(stream.rest + 1, MAX_REST)
        stream.rests_until = session.length + stream.rest
        return Proposal(found, number)

    def next_draft(self, live: Live, taken: Sequence[int], mask: Mask) -> int | None:
        stream = self._streams[live.session]
        if not taken:
            stream.guess, stream.chance = [], 1.0
        place, before = place_of(mask), taken[-1] if taken else live.session.pending
        assert before is not None, live
        draft, kind = self._suggested(stream, live, taken, mask, Guess(None, FREE, place, before))
        stream.guess.append(Guess(draft, kind, place, before))
        if draft is None:
            return None
        if kind >= 0:
            rate = stream.rates[kind]
        else:
            rate = 1.0 if kind == CERTAIN else stream.choices.rate(place)
        row = len(taken), stream.num_streams, live.session.num_unfed
        pays = self.costs.one_more_pays(rate, stream.chance, *row)
        stream.chance *= rate
        return draft if pays else None

    def _suggested(
        self, stream: Stream, live: Live, taken: Sequence[int], mask: Mask, where: Guess
    ) -> tuple[int | None, int]:
        """The token that is left or likely, and its kind."""
        ids = few_ids(mask)
        if len(ids) == 1:
            return ids[0], CERTAIN
        number, choices = len(taken), stream.choices
        if number < len(live.drafts) and list(live.drafts[:number]) == list(taken):
            draft = live.drafts[number]
            if allows(mask, draft):
                return draft, stream.kind if ids else FREE
        assert where.place is not None
        last = choices.last(where.place)
        longest = longest_of(ids, self._token_bytes)
        if longest is not None:
            return longest if last is None else last, FORCED
        after = choices.after(where.before)
        if after is None or not allows(mask, after):
            return last, AGAIN
        is_likelier = last is None or stream.rates[AFTER] >= choices.rate(where.place)
        return (after, AFTER) if is_likelier else (last, AGAIN)

    @property
    def num_indexes(self) -> int:
        """Indexes in memory, of `INDEX_BYTES` each."""
        return len(self._streams)

    def _stream(self, session: Session) -> Stream:
        """The session's, which was used last now."""
        stream = self._streams.pop(session, None)
        if stream is None or stream.epoch != session.epoch or stream.length > session.length:
            stream = Stream()
            stream.epoch = session.epoch
        self._streams[session] = stream
        if len(self._streams) > MAX_INDEXES:
            oldest = next(iter(self._streams))
            del self._streams[oldest]
        return stream


def _catch_up(stream: Stream, live: Live) -> None:
    """Reads what the text has beyond the index, as far as it is still known.

    What a client predicts is read first, as if it had followed the end of the prompt once before.
    """
    session, request = live.session, live.request
    num_missing = session.length - stream.length
    if stream.length <= live.length and request.tokens:
        stream.guess = []
        known = session.last(num_missing)
        if len(known) == num_missing:  # the end of the last answer was not looked up
            stream.index.extend(known[: live.length - stream.length])
        if request.prediction:
            stream.index.extend((*request.tokens[-LEAD_TOKENS:], *request.prediction))
        prompt = TokenArray.joined(live.start, request.tokens)
        stream.index.extend(prompt)
        num_missing = session.length - live.length - len(prompt)
    stream.read(session.last(num_missing))
    stream.length = session.length


def allows(mask: Mask, token: int) -> bool:
    """Whether ``token`` is in ``mask``."""
    return bool(mask[token // 32] >> (token % 32) & 1)


def few_ids(mask: Mask) -> Ids:
    """The ids in ``mask``, if they are no more than `MAX_FORCED_IDS`; else none."""
    words = np.flatnonzero(mask)
    if len(words) > MAX_FORCED_IDS:
        return ()
    bits = np.flatnonzero(np.unpackbits(mask[words].view(np.uint8), bitorder="little"))
    if len(bits) > MAX_FORCED_IDS:
        return ()
    return tuple((words[bits // 32] * 32 + bits % 32).tolist())


def longest_of(ids: Sequence[int], token_bytes: Callable[[int], bytes]) -> int | None:
    """The token of ``ids`` that all others begin; None where the text is not forced."""
    if not ids:
        return None
    texts = {id: token_bytes(id) for id in ids}
    longest = max(ids, key=lambda id: len(texts[id]))
    is_forced = all(text and texts[longest].startswith(text) for text in texts.values())
    return longest if is_forced else None
