"""Drafts: tokens proposed before they are drawn, so that one call checks several."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from server.engine.request import Live
from server.engine.runner import Mask
from server.engine.session import Session
from server.engine.text import TokenArray

# -------------------------------------------------------------------------------------------------
# What proposes tokens before they are drawn, so that one reading of the weights checks several.
#
# A draw depends on the seed and the position alone, so a draft is right exactly if it is what is
# drawn in its place: whatever a drafter proposes, the text is the same to the bit, and only the
# number of steps changes (Leviathan et al. 2023, "Fast inference from transformers via speculative
# decoding"; without their rejection step, which is for draws that cannot be repeated).


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


# -------------------------------------------------------------------------------------------------
# How many drafts pay: what a call of more rows takes, against the tokens that it may give.


#: Rows of one stream whose calls are measured at start.
MEASURED_ROWS = (1, 2, 4, 8, 16)

#: Steps in which the part of drafts that are right is told apart.
_RATES = 64

LEAST_ROW = 0.02

#: By which the rate must grow for drafts to be made: less is within what the times vary.
MARGIN = 1.03


class DraftCosts:
    """Seconds of a call of ``rows[i]`` rows, ``times_s[i]``; between them they are interpolated.

    No row is taken to cost less than `LEAST_ROW` of a call of one: the times vary by more.
    ``keep_s`` is what a call takes longer that leaves the state before it, ``draft_s`` what it
    takes to make one draft.
    """

    def __init__(
        self,
        times_s: Sequence[float],
        keep_s: float = 0.0,
        rows: Sequence[int] = MEASURED_ROWS,
        draft_s: float = 0.0,
    ) -> None:
        self.rows = tuple(rows)
        least = [times_s[0] * (1 + LEAST_ROW * (number - 1)) for number in rows]
        self.times_s = tuple(accumulate(map(max, times_s, least), max))
        self.keep_s, self.draft_s = keep_s, draft_s
        self._known: dict[tuple[int, int, int, int], int] = {}

    def with_drafts_of(self, draft_s: float) -> DraftCosts:
        """The same where each draft takes so long to make."""
        return DraftCosts(self.times_s, self.keep_s, self.rows, draft_s)

    def call_s(self, num_rows: int) -> float:
        """What a call of ``num_rows`` takes; beyond what was measured, at the last slope."""
        upper = min(max(bisect_left(self.rows, num_rows), 1), len(self.rows) - 1)
        left, right = self.rows[upper - 1], self.rows[upper]
        slope = (self.times_s[upper] - self.times_s[upper - 1]) / (right - left)
        return self.times_s[upper - 1] + slope * (num_rows - left)

    def best_number(self, rate: float, limit: int, num_streams: int = 1, num_unfed: int = 0) -> int:
        """The number of drafts, up to ``limit``, with which a step gives most tokens per second.

        A draft is right with probability ``rate`` where those before it are. The step has a token
        of each of ``num_streams``, and ``num_unfed`` more are fed in any case. After a draft that
        is wrong the tokens taken are fed again, with the one before them.
        """
        key = int(rate * _RATES), limit, num_streams, num_unfed
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._best_number(key[0] / _RATES, *key[1:])
        return found

    def _best_number(self, rate: float, limit: int, num_streams: int, num_unfed: int) -> int:
        num_rows = num_streams + num_unfed
        alone_s = self.call_s(num_rows)
        row_s = self.call_s(num_rows + 1) - alone_s
        best, best_speed = 0, MARGIN * num_streams / alone_s
        num_right, all_right = 0.0, 1.0
        for number in range(1, limit + 1):
            all_right *= rate
            num_right += all_right
            again_s = row_s * (1 + num_right)
            seconds = self.call_s(num_rows + number) + self.keep_s + (1 - all_right) * again_s
            seconds += number * self.draft_s
            speed = (num_streams + num_right) / seconds
            if speed > best_speed:
                best, best_speed = number, speed
        return best

    def one_more_pays(
        self,
        rate: float,
        chance: float,
        num_drafts: int,
        num_streams: int = 1,
        num_unfed: int = 0,
    ) -> bool:
        """Whether one more draft than ``num_drafts`` pays, which are all right with ``chance``.

        It is right with probability ``rate`` then. The first one also pays for the state before.
        """
        num_rows = num_streams + num_unfed + num_drafts
        row_s = self.call_s(num_rows + 1) - self.call_s(num_rows)
        wrong_s = row_s * (1 + num_drafts)
        seconds = row_s + chance * (1 - rate) * wrong_s
        if not num_drafts:
            seconds += self.keep_s
        gained_s = chance * rate * self.call_s(num_streams + num_unfed) / num_streams
        return gained_s > MARGIN * seconds

    def lost_s(self, num_drafts: int, num_right: int, num_streams: int = 1) -> float:
        """What a step took longer for its drafts than it took less for those that were right."""
        alone_s = self.call_s(num_streams)
        row_s = self.call_s(num_streams + 1) - alone_s
        seconds = self.call_s(num_streams + num_drafts) - alone_s + self.keep_s
        seconds += num_drafts * self.draft_s
        if num_right < num_drafts:
            seconds += row_s * (1 + num_right)
        return seconds - num_right * alone_s / num_streams

    def ever_pays(self, limit: int) -> bool:
        """Whether drafts of one stream that are always right make it faster."""
        return self.best_number(1.0, limit) > 0


# -------------------------------------------------------------------------------------------------
# What came before where a grammar allowed the same tokens, which often comes again.
#
# A mask stands for a place in a grammar: the end of a number, a choice of words, any character of a
# string. In a list of records the number ends with the same token each time, though no two numbers
# are alike, and what follows a word in one field follows it in the next.


#: Tokens that are remembered of one text, of each kind; then it begins again.
MAX_CHOICES = 512

#: How often the last token of a place is taken to come again before that was seen, and the part
#: that one more token has in it.
FIRST_CHOICE_RATE, CHOICE_LEARNING_RATE = 0.2, 1 / 4


def place_of(mask: Mask) -> int:
    """Of all places that allow the same tokens."""
    return hash(mask.tobytes())


class Choices:
    """The last tokens of places, and after which tokens they came."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # by places
        self._rates: dict[int, float] = {}  # by places
        self._after: dict[int, int] = {}  # by the token before

    def last(self, place: int) -> int | None:
        """What came there last."""
        return self._last.get(place)

    def rate(self, place: int) -> float:
        """How often the same token comes there as the last time."""
        return self._rates.get(place, FIRST_CHOICE_RATE)

    def after(self, before: int) -> int | None:
        """What came the last time after the token ``before``."""
        return self._after.get(before)

    def learn(self, place: int, before: int, token: int) -> None:
        """``token`` came there after ``before``."""
        if max(len(self._last), len(self._after)) > MAX_CHOICES:
            for known in (self._last, self._rates, self._after):
                known.clear()
        if place in self._last:
            rate = self.rate(place)
            self._rates[place] = rate + CHOICE_LEARNING_RATE * ((self._last[place] == token) - rate)
        self._last[place] = self._after[before] = token


# -------------------------------------------------------------------------------------------------
# The end of a text, found again further back in it: what followed there may follow here.
#
# A suffix that occurs twice is the cheapest guess at the next tokens (Saxena 2023, "Prompt lookup
# decoding"; Oliaro et al. 2024, "SuffixDecoding"). The last tokens are in a ring. Each place is
# chained to the one before it where the last `NGRAM` tokens have the same hash, so that a token
# takes constant time to add, and a look-up a bounded one.


#: Tokens that a suffix must have in common with an earlier place.
NGRAM = 3

#: Tokens that are remembered; a power of two.
RING_TOKENS = 8192
_RING = RING_TOKENS - 1
_NUM_HEADS = 2 * RING_TOKENS

#: Earlier places that a look-up compares, and tokens that it compares at each.
MAX_PLACES = 8
MAX_MATCH = 32

#: Places are 32-bit numbers: after so many tokens an index begins again.
_MAX_COUNT = 1 << 30

#: What one index takes, in bytes: the ring, the chains and their heads.
INDEX_BYTES = 4 * (2 * RING_TOKENS + _NUM_HEADS)


class SuffixIndex:
    """The last `RING_TOKENS` tokens of a text; `INDEX_BYTES` of memory, whatever its length."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._ring = array("i", bytes(4 * RING_TOKENS))
        self._before = array("i", bytes(4 * RING_TOKENS))  # the place before with the same hash
        self._heads = array("i", b"\xff" * (4 * _NUM_HEADS))  # the last place of each hash, or -1
        self._count = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds ``tokens``, of which the last `RING_TOKENS` count."""
        if self._count >= _MAX_COUNT:
            self._clear()
        tokens = tokens[-RING_TOKENS:]
        ring, before, heads, count = self._ring, self._before, self._heads, self._count
        second, first = ring[(count - 2) & _RING], ring[(count - 1) & _RING]
        for token in tokens:
            place = count & _RING
            ring[place] = token
            key = ((second * 31 + first) * 8191 + token) % _NUM_HEADS
            before[place], heads[key] = heads[key], count
            second, first = first, token
            count += 1
        self._count = count

    def find(self) -> tuple[int, int]:
        """Where the text has been that its end repeats, and how many tokens are the same.

        Of the nearest places the one with most in common, 0 tokens where there is none. The place
        is that of the token that came next, for `following`.
        """
        ring, last = self._ring, self._count - 1
        oldest = max(self._count - RING_TOKENS, 0)
        found, longest = 0, NGRAM - 1
        if last < NGRAM:
            return 0, 0
        place = self._before[last & _RING]
        for _ in range(MAX_PLACES):
            limit = min(place - oldest + 1, MAX_MATCH)
            if limit < NGRAM:
                break
            length = 0
            while (
                length < limit and ring[(place - length) & _RING] == ring[(last - length) & _RING]
            ):
                length += 1
            if length > longest:
                found, longest = place + 1, length
                if length == MAX_MATCH:
                    break
            place = self._before[place & _RING]
        return (found, longest) if found else (0, 0)

    def following(self, place: int, limit: int) -> list[int]:
        """The next ``limit`` tokens if the text continues as it did from ``place`` on.

        Where that leads to the text's end it continues from ``place`` again.
        """
        ring, period = self._ring, self._count - place
        return [ring[(place + i % period) & _RING] for i in range(limit)]


# -------------------------------------------------------------------------------------------------
# Drafts from a session's own past, its prompt, a client's prediction, and a grammar.
#
# How many are made follows from what calls of more rows take and from how often such drafts have
# been right in this stream. For that no draft needs to be fed: what would have been proposed is
# compared with what was drawn, so that a text without repetitions costs nothing but the look-ups.


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
    """See `Drafter`. ``costs`` are those of the runner.

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
