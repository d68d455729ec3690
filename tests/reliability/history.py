"""What every client saw of every session, held against the log and against itself.

A test records each attachment and each event of its readers, and who held a
session from which event on. `History.problems` then names every gap, duplicate,
rewrite, event that was sent and is not in the log, and sender that was no longer
the holder. Nothing depends on time: only on the order within one reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from server.engine.types import Finished, TokenEvent

#: As the server names it to clients; only compared for equality.
Epoch = int | str

MAX_SHOWN = 20


class Event(NamedTuple):
    """One numbered event: a token, or with ``finish_reason`` the end of a generation."""

    seq: int
    position: int
    token_id: int | None
    text: str
    finish_reason: str | None = None


#: The log's events of each epoch of each session, in the log's order.
Log = Mapping[tuple[str, Epoch], Sequence[Event]]


class Problem(NamedTuple):
    """One thing that must not be. ``reader`` None is the log itself."""

    kind: str
    session: str
    epoch: Epoch
    seq: int
    reader: str | None
    detail: str

    def __str__(self) -> str:
        who = "the log" if self.reader is None else f"reader {self.reader}"
        return (
            f"{self.kind}: {who}, {self.session} epoch {self.epoch} seq {self.seq}: {self.detail}"
        )


def event_of_frame(frame: Mapping[str, Any]) -> Event | None:
    """The event in a frame of the wire; None for frames without a number."""
    if frame["type"] == "token":
        return Event(frame["seq"], frame["position"], frame["token_id"], frame["text"])
    if frame["type"] == "finished":
        return Event(frame["seq"], frame["position"], None, frame["text"], frame["finish_reason"])
    return None


def event_of_entry(entry: TokenEvent | Finished) -> Event:
    """The event in an entry of the log, which is what the engine made."""
    if isinstance(entry, TokenEvent):
        return Event(entry.seq, entry.position, entry.token_id, entry.text)
    return Event(entry.seq, entry.position, None, entry.text, entry.finish_reason)


class _Attached(NamedTuple):
    """From here on a reader's events come from ``holder`` and follow ``after_seq``."""

    holder: str
    epoch: Epoch
    after_seq: int


class _Delivery(NamedTuple):
    """An event as a reader got it, with the number that it should have had."""

    holder: str
    epoch: Epoch
    expected_seq: int
    event: Event


@dataclass
class Reader:
    """One client of one session, over all its connections: it keeps everything, in order."""

    name: str
    session: str
    _records: list[_Attached | Event] = field(default_factory=list)

    def attach(self, epoch: Epoch, after_seq: int, holder: str = "server") -> None:
        """A connection to ``holder`` begins; the next event must be ``after_seq`` + 1."""
        self._records.append(_Attached(holder, epoch, after_seq))

    def saw(self, event: Event) -> None:
        """An event has come. Call `attach` before the first one."""
        assert self._records, "saw before attach"
        self._records.append(event)

    def saw_frame(self, frame: Mapping[str, Any]) -> None:
        """A frame of the wire has come; one without a number is passed over."""
        if (event := event_of_frame(frame)) is not None:
            self.saw(event)

    @property
    def last_seq(self) -> int:
        """What a resume has to say that it has seen; 0 before anything was."""
        last = self._records[-1] if self._records else None
        return last.after_seq if isinstance(last, _Attached) else last.seq if last else 0

    @property
    def epochs(self) -> list[Epoch]:
        """The epochs of its attachments, in order."""
        return [record.epoch for record in self._records if isinstance(record, _Attached)]

    def deliveries(self) -> Iterator[_Delivery]:
        """Every event with who sent it and which number was due."""
        attached: _Attached | None = None
        expected = 0
        for record in self._records:
            if isinstance(record, _Attached):
                attached, expected = record, record.after_seq + 1
                continue
            assert attached is not None
            yield _Delivery(attached.holder, attached.epoch, expected, record)
            expected = record.seq + 1


class History:
    """All readers of a run, and who held its sessions."""

    def __init__(self) -> None:
        self.readers: list[Reader] = []
        self._held: defaultdict[str, list[tuple[str, Epoch, int]]] = defaultdict(list)

    def reader(self, name: str, session: str) -> Reader:
        """A new reader, of which this history knows."""
        reader = Reader(name, session)
        self.readers.append(reader)
        return reader

    def held(self, session: str, holder: str, epoch: Epoch, after_seq: int) -> None:
        """``holder`` took the session over when the log ended at ``after_seq``.

        The holder before it may still deliver what was logged until then, and
        nothing after it.
        """
        self._held[session].append((holder, epoch, after_seq))

    def problems(
        self,
        log: Log,
        complete: bool = True,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> list[Problem]:
        """Everything that is wrong; the log first, then each reader.

        With ``complete`` every reader must have all that the log has of its last
        epoch. With ``decode`` the joined text of an epoch must be that of its
        tokens; use it where no prompt came in between and nothing was stopped.
        """
        found = [problem for key, events in log.items() for problem in _log(*key, events)]
        if decode is not None:
            for (session, epoch), events in log.items():
                found += _text(session, epoch, events, decode)
        for reader in self.readers:
            found += _sequence(reader)
            found += _epochs(reader)
            found += _against_log(reader, log)
            found += _senders(reader, self._held[reader.session])
            if complete:
                found += _missing(reader, log)
        return found

    def check(
        self,
        log: Log,
        complete: bool = True,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """Raises `AssertionError` that lists the `problems`, if there are any."""
        found = self.problems(log, complete, decode)
        shown = "\n".join(str(problem) for problem in found[:MAX_SHOWN])
        assert not found, f"{len(found)} problems:\n{shown}"


def _log(session: str, epoch: Epoch, events: Sequence[Event]) -> Iterator[Problem]:
    """The log by itself: numbers without gaps, positions that continue."""
    for before, event in pairwise(events):
        where = (session, epoch, event.seq, None)
        if event.seq != before.seq + 1:
            yield Problem("log gap", *where, f"follows {before.seq}")
        due = before.position + (before.token_id is not None)
        # Between two generations there may be a prompt.
        after_end = before.finish_reason is not None
        if event.position != due and not (after_end and event.position > due):
            yield Problem("position", *where, f"is at {event.position}, must be at {due}")


def _text(
    session: str, epoch: Epoch, events: Sequence[Event], decode: Callable[[Sequence[int]], str]
) -> Iterator[Problem]:
    """The pieces of text make the whole, but for a last character that is not whole yet."""
    if not events:
        return
    whole = decode([event.token_id for event in events if event.token_id is not None])
    joined = "".join(event.text for event in events)
    rest = whole[len(joined) :]
    if not whole.startswith(joined) or rest.strip("\N{REPLACEMENT CHARACTER}"):
        detail = f"joins to {joined[-80:]!r}, the tokens say {whole[-80:]!r}"
        yield Problem("text", session, epoch, events[-1].seq, None, detail)


def _sequence(reader: Reader) -> Iterator[Problem]:
    """Each event has the number that was due."""
    for delivery in reader.deliveries():
        seq, due = delivery.event.seq, delivery.expected_seq
        if seq != due:
            kind = "gap" if seq > due else "duplicate"
            where = (reader.session, delivery.epoch, seq, reader.name)
            yield Problem(kind, *where, f"{due} was due")


def _epochs(reader: Reader) -> Iterator[Problem]:
    """An epoch that ended does not come back."""
    over: set[Epoch] = set()
    for before, epoch in pairwise(reader.epochs):
        if epoch != before:
            over.add(before)
        if epoch in over:
            detail = f"came again after epoch {before}"
            yield Problem("epoch", reader.session, epoch, 0, reader.name, detail)


def _against_log(reader: Reader, log: Log) -> Iterator[Problem]:
    """Nothing was sent that is not in the log, and nothing as something else."""
    logged: dict[Epoch, dict[int, Event]] = {}
    for delivery in reader.deliveries():
        epoch, event = delivery.epoch, delivery.event
        if epoch not in logged:
            logged[epoch] = {entry.seq: entry for entry in log.get((reader.session, epoch), ())}
        entry = logged[epoch].get(event.seq)
        where = (reader.session, epoch, event.seq, reader.name)
        if entry is None:
            yield Problem("not in the log", *where, f"saw {event}")
        elif entry != event:
            yield Problem("differs from the log", *where, f"saw {event}, logged {entry}")


def _senders(reader: Reader, spans: Sequence[tuple[str, Epoch, int]]) -> Iterator[Problem]:
    """A sender may repeat what earlier holders made, and nothing that a later holder made."""
    for delivery in reader.deliveries():
        event = delivery.event
        maker = max(
            (
                index
                for index, (_, epoch, after_seq) in enumerate(spans)
                if epoch == delivery.epoch and event.seq > after_seq
            ),
            default=None,
        )
        if maker is None:
            continue
        if delivery.holder not in {holder for holder, _, _ in spans[maker:]}:
            detail = f"{delivery.holder} sent it, the holder is {spans[maker][0]}"
            where = (reader.session, delivery.epoch, event.seq, reader.name)
            yield Problem("two holders", *where, detail)


def _missing(reader: Reader, log: Log) -> Iterator[Problem]:
    """The reader has all that is logged after what it first asked for."""
    if not reader.epochs:
        return
    epoch = reader.epochs[-1]
    seen = {item.event.seq for item in reader.deliveries() if item.epoch == epoch}
    first = next(
        record.after_seq
        for record in reader._records
        if isinstance(record, _Attached) and record.epoch == epoch
    )
    for entry in log.get((reader.session, epoch), ()):
        if entry.seq > first and entry.seq not in seen:
            where = (reader.session, epoch, entry.seq, reader.name)
            yield Problem("never delivered", *where, f"logged {entry}")
