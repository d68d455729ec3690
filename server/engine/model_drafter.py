"""Drafts of a small model that has the vocabulary of the large one, or of its multi-token head.

It draws as the request does, with its seed at the same positions, so that its drafts are right
where the two models would draw the same, greedy or not. Its states are those of a pool of its own,
of constant size, and are only ever a guess at a session's text: what is lost, as by a rewind, an
eviction or another session's need, is rebuilt from the last tokens, and no bit of the text hangs on
it. A multi-token head reads a token and what the large model's final norm gave for the one before,
which a runner in between keeps of what it was last fed. Where the text repeats itself, and under
grammars, the drafts of its past are made instead.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from server.engine.drafts import NO_DRAFTS, DraftCosts, Proposal, SuffixDrafter
from server.engine.request import Live
from server.engine.runner import (
    CpuStatePool,
    Draw,
    Feed,
    Mask,
    NativeRunner,
    RowOutput,
    Runner,
    StatePool,
    TokenScore,
)
from server.engine.sampling import PENALTY_WINDOW
from server.engine.session import Session
from server.engine.types import SamplingParams

if TYPE_CHECKING:
    from model.native.runtime import Runtime

logger = logging.getLogger("everstream.engine")

#: Tokens that it reads in one step, of all streams together, where it is behind.
READ_TOKENS = 64

#: How often its drafts are taken to be right before any was seen, and the part of one more.
FIRST_RATE, LEARNING_RATE = 0.6, 1 / 16

#: The part of the large model's time that drafts may cost more than they give, and its steps that
#: they may cost to begin with; as many more where that part was not used before. So a model that is
#: never right costs little, whatever is expected.
LOSS_PART, LOSS_STEPS = 0.01, 2

#: After so many tokens without drafts, because too few were right, a stream is tried again.
RETRY_TOKENS = 1024


class Reading:
    """What it has read of one session: ``length`` tokens of the text, in ``slot``.

    A head has read those from ``first`` on.
    """

    def __init__(self, slot: int, epoch: int) -> None:
        self.slot, self.epoch, self.length, self.first = slot, epoch, 0, 0
        self.rate, self.tried = FIRST_RATE, 0  # the length of the text when it was tried last
        self.guess: Sequence[int] = ()
        self.draw: tuple[object, Draw] | None = None  # with the request that it is for

    def compare(self, session: Session) -> int:
        """Learns from the tokens that came where the last guess was; how many were right."""
        tokens = session.last(session.length - self.length) if self.guess else ()
        num_right = 0
        for guessed, token in zip(self.guess, tokens, strict=False):
            self.rate += LEARNING_RATE * ((guessed == token) - self.rate)
            if guessed != token:
                break
            num_right += 1
        return num_right

    def drawing(self, params: SamplingParams, runner: Runner) -> Draw:
        """Those of a request, which are prepared once."""
        if self.draw is None or self.draw[0] is not params:
            self.draw = params, runner.prepare(params)
        return self.draw[1]


class ModelDrafter:
    """See `server.engine.drafts.Drafter`. ``past`` is asked first.

    ``pool`` has the states of the small model, which ``runner`` runs: as many slots as streams
    that drafts are made for. ``costs`` are those of the large one, with the time of a draft.
    It ``is_broken`` after an error, and drafts no more.
    """

    def __init__(
        self, past: SuffixDrafter, runner: Runner, pool: StatePool, costs: DraftCosts
    ) -> None:
        self.max_drafts, self.max_streams = past.max_drafts, past.max_streams
        self._past, self._runner, self._pool, self._costs = past, runner, pool, costs
        assert not runner.grid, "its states are read in pieces of any length"
        slots = [pool.allocate() for _ in range(pool.num_slots)]
        self._slots = [slot for slot in slots if slot is not None]
        self.is_broken = False
        self._lost_s = 0.0  # by all drafts that were compared, less what may be lost
        self._readings: WeakKeyDictionary[Session, Reading] = WeakKeyDictionary()

    def propose(self, live: Live, limit: int, num_running: int) -> Proposal:
        proposal = self._past.propose(live, limit, num_running)
        is_free = live.session.constraint is None and live.request.speculation
        if proposal.number or not is_free or self.is_broken:
            return proposal
        try:
            drafts = self._proposed(live, limit, num_running)
        except Exception:  # the texts do not need it
            logger.exception("the draft model or head failed; it drafts no more")
            self.is_broken = True
            return NO_DRAFTS
        return Proposal(drafts, len(drafts), "model")

    def next_draft(self, live: Live, taken: Sequence[int], mask: Mask) -> int | None:
        return self._past.next_draft(live, taken, mask)

    def _proposed(self, live: Live, limit: int, num_running: int) -> Sequence[int]:
        session = live.session
        reading = self._reading(session)
        if reading.length == session.length:  # its row was postponed
            return reading.guess[:limit]
        self._count(reading, session, num_running)
        number = self._costs.best_number(reading.rate, limit, num_running, session.num_unfed)
        if number:
            reading.tried = session.length
        elif session.length - reading.tried >= RETRY_TOKENS:
            reading.rate = FIRST_RATE
        if self._lost_s > LOSS_STEPS * self._costs.call_s(1):
            return ()
        most = max(READ_TOKENS // num_running, self.max_drafts + 1)
        if not number or not self._read(reading, session, most):
            return ()
        reading.guess = self._drafts(reading, live, number)
        return reading.guess

    def _count(self, reading: Reading, session: Session, num_running: int) -> None:
        """What the last guess has lost, and that the stream has taken another step."""
        num_right, costs = reading.compare(session), self._costs
        if reading.guess:
            self._lost_s += costs.lost_s(len(reading.guess), num_right, num_running)
        reading.guess = ()
        self._lost_s -= LOSS_PART * costs.call_s(num_running) / num_running  # of its share
        self._lost_s = max(self._lost_s, -LOSS_STEPS * costs.call_s(1))

    def _reading(self, session: Session) -> Reading:
        """The session's, which was used last now."""
        reading = self._readings.pop(session, None)
        if reading is None:
            taken = {other.slot for other in self._readings.values()}
            slot = next((slot for slot in self._slots if slot not in taken), None)
            if slot is None:
                slot = self._readings.pop(next(iter(self._readings))).slot
            reading = Reading(slot, session.epoch)
            reading.tried = session.length
        elif reading.epoch != session.epoch or reading.length > session.length:
            reading.epoch, reading.length, reading.guess = session.epoch, 0, ()
        self._readings[session] = reading
        return reading

    def _read(self, reading: Reading, session: Session, most: int) -> bool:
        """Whether no more than ``most`` tokens are left to read; else so many are read."""
        num_missing = session.length - reading.length
        known = session.last(num_missing)
        if not reading.length or len(known) < num_missing:
            self._pool.zero(reading.slot)
            known = session.last(PENALTY_WINDOW)
            reading.length = session.length - len(known)
        if len(known) <= most:
            return True
        self._lost_s += self._costs.draft_s
        self._runner.run([Feed(reading.slot, reading.length, known[:most])])
        reading.length += most
        return False

    def _drafts(self, reading: Reading, live: Live, number: int) -> list[int]:
        """Reads the text to its end, and draws one token after the other behind that.

        The state is the one at the end of the text again then.
        """
        session, slot, params = live.session, reading.slot, live.request.sampling
        assert params is not None, live
        draw = reading.drawing(params, self._runner)
        text, drafts = session.last(PENALTY_WINDOW), list[int]()
        tokens = session.last(session.length - reading.length)
        (spare,) = self._pool.spares([(slot, session.length, number)])
        while True:
            position = session.length + len(drafts) - len(tokens)
            recent = text[-PENALTY_WINDOW:] if live.penalized else None
            target = spare if len(drafts) == 1 else None
            (row,) = self._runner.run([Feed(slot, position, tokens, draw, recent, target=target)])
            (draft,) = row[0]
            if not drafts:
                reading.length = session.length
            if target is not None:
                self._pool.swap(slot, spare)
            if draft < 0:  # its output is not finite
                break
            drafts.append(draft)
            if len(drafts) == number:
                break
            tokens = [draft]
            text.append(draft)
        if len(drafts) > 1 or (drafts and draft < 0):
            self._pool.swap(slot, spare)
        return drafts


# -------------------------------------------------------------------------------------------------
# A multi-token head, which continues what the large model has computed of the text.


Hidden = npt.NDArray[np.float32]


class Trail:
    """The last tokens that a slot was fed, from position ``begin`` on, and what came of each.

    ``hidden`` are [width] each.
    """

    def __init__(self, begin: int) -> None:
        self.begin, self.tokens, self.hidden = begin, list[int](), list[Hidden]()

    def feed(self, position: int, tokens: Sequence[int], hidden: Hidden) -> None:
        """Continues at ``position``, which is not beyond the end."""
        kept = position - self.begin
        self.tokens[kept:], self.hidden[kept:] = tokens, hidden
        num_over = len(self.tokens) - PENALTY_WINDOW
        if num_over > 0:
            del self.tokens[:num_over], self.hidden[:num_over]
            self.begin += num_over

    def follows(self, position: int) -> bool:
        """Whether it can continue there."""
        return self.begin <= position <= self.begin + len(self.tokens)


class WatchedRunner:
    """See `Runner`: ``runner``, and the hidden states of what it was last fed, for each slot.

    Steps of more than ``max_streams`` rows leave none: nothing is drafted then.
    """

    grid: tuple[int, ...] = ()

    def __init__(self, runner: NativeRunner, max_streams: int) -> None:
        self._runner, self._max_streams = runner, max_streams
        self._trails: dict[int, Trail] = {}

    def prepare(self, params: SamplingParams) -> Draw:
        return self._runner.prepare(params)

    def run(self, feeds: Sequence[Feed]) -> list[RowOutput]:
        outputs = self._runner.run(feeds)
        try:
            end = 0
            for feed in feeds if len(feeds) <= self._max_streams else ():
                end += len(feed.tokens)
                self._keep(feed, end)
        except Exception:  # the states have changed: the step must count
            logger.exception("what a multi-token head reads was lost")
            self._trails.clear()
        return outputs

    def score(self, feed: Feed, following: int, num_top: int = 0) -> list[TokenScore]:
        return self._runner.score(feed, following, num_top)

    def embed(self, feed: Feed) -> npt.NDArray[Any]:
        return self._runner.embed(feed)

    def before_last(self, session: Session, num: int) -> list[Hidden]:
        """The hidden states before each of the last ``num`` tokens of a text, or of fewer."""
        assert session.slot is not None, session
        trail, rows = self._trails.get(session.slot), list[Hidden]()
        at = session.length - 2
        for token in reversed(session.last(num + 1)[:-1]):
            index = -1 if trail is None else at - trail.begin
            if trail is None or not 0 <= index < len(trail.tokens) or trail.tokens[index] != token:
                break
            rows.append(trail.hidden[index])
            at -= 1
        return rows[::-1]

    def _keep(self, feed: Feed, end: int) -> None:
        """Of the row of the last run whose tokens end before ``end``, as many as a trail has."""
        tokens = feed.tokens[-PENALTY_WINDOW:]
        position = feed.position + len(feed.tokens) - len(tokens)
        trail = self._trails.pop(feed.slot, None)
        if trail is None or not trail.follows(position):
            trail = Trail(position)
        trail.feed(position, tokens, self._runner.hidden(end - len(tokens), len(tokens)))
        self._trails[feed.slot] = trail
        if len(self._trails) > self._max_streams:
            del self._trails[next(iter(self._trails))]  # was fed longest ago


class HeadDrafter(ModelDrafter):
    """A `ModelDrafter` with the large model's multi-token head, ``head``.

    It drafts once the large model runs in what `watch` returns.
    """

    def __init__(
        self, past: SuffixDrafter, head: Runtime, pool: CpuStatePool, costs: DraftCosts
    ) -> None:
        super().__init__(past, NativeRunner(head, pool), pool, costs)
        self._head, self._blocks = head, pool.blocks
        self._watched: WatchedRunner | None = None

    def watch(self, runner: Runner) -> Runner:
        """The same runner, which keeps what the head reads."""
        assert isinstance(runner, NativeRunner), runner
        self._watched = WatchedRunner(runner, self.max_streams)
        return self._watched

    def _read(self, reading: Reading, session: Session, most: int) -> bool:
        num_missing = session.length - reading.length
        rows = self._before_last(session, min(num_missing, PENALTY_WINDOW - 1))
        if not rows:  # nothing was fed since it lost them
            reading.length = 0
            return False
        if not reading.length or len(rows) < num_missing:
            self._pool.zero(reading.slot)
            reading.first = reading.length = session.length - len(rows)
        if len(rows) <= most:
            return True
        self._lost_s += self._costs.draft_s
        tokens = session.last(len(rows))[:most]
        self._run(reading, reading.length - reading.first, tokens, np.stack(rows[:most]))
        reading.length += most
        return False

    def _drafts(self, reading: Reading, live: Live, number: int) -> list[int]:
        """As of `ModelDrafter`; each draft's hidden state is the head's own."""
        session, params = live.session, live.request.sampling
        assert params is not None, live
        draw = reading.drawing(params, self._runner)
        text, drafts = session.last(PENALTY_WINDOW), list[int]()
        tokens = session.last(session.length - reading.length)
        hidden = np.stack(self._before_last(session, len(tokens)))
        position = reading.length - reading.first
        while len(drafts) < number:
            recent = text[-PENALTY_WINDOW:] if live.penalized else None
            draft = self._run(reading, position, tokens, hidden, draw, recent)
            position += len(tokens)
            if not drafts:
                reading.length = session.length
                self._pool.spares([(reading.slot, position, number)])
            if draft < 0:  # its output is not finite
                break
            drafts.append(draft)
            text.append(draft)
            hidden, tokens = self._head.hidden(len(tokens) - 1, 1), [draft]
        self._pool.restore(reading.slot)
        return drafts

    def _run(
        self,
        reading: Reading,
        position: int,
        tokens: Sequence[int],
        hidden: Hidden,
        draw: Draw | None = None,
        recent: Sequence[int] | None = None,
    ) -> int:
        """What is drawn after ``tokens``; -1 without a ``draw``."""
        (drawn,) = self._head.run(
            *(self._blocks, [reading.slot], [position], [tokens], [draw]),
            recents=None if recent is None else [recent],
            hidden=hidden,
            draw_offset=reading.first,
        )
        return drawn[0] if drawn else -1

    def _before_last(self, session: Session, num: int) -> list[Hidden]:
        return [] if self._watched is None else self._watched.before_last(session, num)
