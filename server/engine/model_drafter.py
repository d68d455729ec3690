"""Drafts of a small model that has the vocabulary of the large one.

It draws as the request does, with its seed at the same positions, so that its drafts are right
where the two models would draw the same, greedy or not. Its states are those of a pool of its own,
of constant size, and are only ever a guess at a session's text: what is lost, as by a rewind, an
eviction or another session's need, is rebuilt from the last tokens, and no bit of the text hangs on
it. Where the text repeats itself, and under grammars, the drafts of its past are made instead.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from server.engine.drafts import NO_DRAFTS, DraftCosts, Proposal, SuffixDrafter
from server.engine.request import Live
from server.engine.runner import Draw, Feed, Mask, Runner, StatePool
from server.engine.sampling import PENALTY_WINDOW
from server.engine.session import Session

logger = logging.getLogger("everstream.engine")

#: Tokens that it reads in one step, of all streams together, where it is behind.
READ_TOKENS = 64

#: How often its drafts are taken to be right before any was seen, and the part of one more.
FIRST_RATE, LEARNING_RATE = 0.6, 1 / 16

#: After so many tokens without drafts, because too few were right, a stream is tried again.
RETRY_TOKENS = 1024


class Reading:
    """What it has read of one session: ``length`` tokens of the text, in ``slot``."""

    def __init__(self, slot: int, epoch: int) -> None:
        self.slot, self.epoch, self.length = slot, epoch, 0
        self.rate, self.tried = FIRST_RATE, 0  # the length of the text when it was tried last
        self.guess: Sequence[int] = ()
        self.draw: tuple[object, Draw] | None = None  # with the request that it is for

    def compare(self, session: Session) -> None:
        """Learns from the tokens that came where the last guess was."""
        tokens = session.last(session.length - self.length) if self.guess else ()
        for guessed, token in zip(self.guess, tokens, strict=False):
            self.rate += LEARNING_RATE * ((guessed == token) - self.rate)
            if guessed != token:
                break
        self.guess = ()


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
        self._readings: WeakKeyDictionary[Session, Reading] = WeakKeyDictionary()

    def propose(self, live: Live, limit: int, num_running: int) -> Proposal:
        proposal = self._past.propose(live, limit, num_running)
        is_free = live.session.constraint is None and live.request.speculation
        if proposal.number or not is_free or self.is_broken:
            return proposal
        try:
            drafts = self._proposed(live, limit, num_running)
        except Exception:  # the texts do not need it
            logger.exception("the draft model failed; it drafts no more")
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
        reading.compare(session)
        number = self._costs.best_number(reading.rate, limit, num_running, session.num_unfed)
        if number:
            reading.tried = session.length
        elif session.length - reading.tried >= RETRY_TOKENS:
            reading.rate = FIRST_RATE
        most = max(READ_TOKENS // num_running, self.max_drafts + 1)
        if not number or not self._read(reading, session, most):
            return ()
        reading.guess = self._drafts(reading, live, number)
        return reading.guess

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
        self._runner.run([Feed(reading.slot, reading.length, known[:most])])
        reading.length += most
        return False

    def _drafts(self, reading: Reading, live: Live, number: int) -> list[int]:
        """Reads the text to its end, and draws one token after the other behind that.

        The state is the one at the end of the text again then.
        """
        session, slot, params = live.session, reading.slot, live.request.sampling
        assert params is not None, live
        if reading.draw is None or reading.draw[0] is not params:
            reading.draw = params, self._runner.prepare(params)
        draw, text, drafts = reading.draw[1], session.last(PENALTY_WINDOW), list[int]()
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
