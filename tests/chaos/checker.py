"""Whether what clients saw of all sessions can be the story of one holder after another.

Of each session, over all connections to all replicas: the same event wherever it
was seen twice, no hole, all of the log and nothing else, the events that a server
without faults gives, and never two replicas that make events at the same time.
`tests.reliability.history` does what concerns one connection alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from tests.chaos.record import Attachment, Recording
from tests.reliability.history import Epoch, Event, Log, Problem

#: A session and one of its epochs.
Key = tuple[str, Epoch]


@dataclass(frozen=True)
class Seen:
    """An event, and the connection that brought it first."""

    event: Event
    attachment: Attachment


Union = dict[Key, dict[int, Seen]]


def problems(
    recording: Recording,
    log: Log,
    expected: Mapping[int, Sequence[Event]],
    finished: Iterable[str] = (),
    lost: Set[Key] = frozenset(),
) -> list[Problem]:
    """Everything that is wrong, that which was seen to be wrong at once first.

    ``log`` has every session of every store that there was. ``expected`` are each
    script's events where nothing goes wrong; of sessions in ``finished`` all of
    them have been seen. ``lost`` are the keys of ``log`` that lost stores had.
    """
    found = [*recording.wrong, *recording.history.problems(log, complete=False)]
    union, contradictions = united(recording)
    found += contradictions
    finished = set(finished)
    found += holes(union)
    found += never_delivered(union, log, finished)
    found += two_holders(recording.attachments)
    found += other_tokens(union, log, recording.scripts, expected)
    found += unfinished(union, recording.scripts, expected, finished)
    found += strangers(recording.scripts, log.keys() - lost)
    return found


def united(recording: Recording) -> tuple[Union, list[Problem]]:
    """Each event once, and every connection that saw another one in its place."""
    union: Union = defaultdict(dict)
    found = []
    for attachment in recording.attachments:
        seen = union[attachment.session, attachment.epoch]
        for delivery in attachment.reader.deliveries():
            event = delivery.event
            first = seen.setdefault(event.seq, Seen(event, attachment))
            if first.event != event:
                detail = f"saw {event}, {first.attachment.name} saw {first.event}"
                found.append(_problem("other event", attachment, event.seq, detail))
    return union, found


def holes(union: Union) -> Iterator[Problem]:
    """Between the first event and the last that anybody saw, somebody saw each."""
    for (session, epoch), seen in union.items():
        for seq in range(1, max(seen, default=0) + 1):
            if seq not in seen:
                detail = f"no reader saw it, the last one seen is {max(seen)}"
                yield Problem("hole", session, epoch, seq, None, detail)


def never_delivered(union: Union, log: Log, finished: Set[str]) -> Iterator[Problem]:
    """Of a session that was read to its end, somebody saw all that is in the log.

    A lost store may have had more of a session than its client.
    """
    for (session, epoch), entries in log.items():
        if session in finished:
            seen = union.get((session, epoch), {})
            for event in entries:
                if event.seq not in seen:
                    yield Problem("never delivered", session, epoch, event.seq, None, str(event))


def two_holders(attachments: Iterable[Attachment]) -> Iterator[Problem]:
    """No replica makes events of a session that another one, or a reader, has taken over.

    The replica that answers that the log ends at L is the holder then. Who was attached
    before may still bring events up to L, late, but none after it: those are made
    by the new holder, and read by the new reader.
    """
    by_session: defaultdict[Key, list[Attachment]] = defaultdict(list)
    for attachment in attachments:
        by_session[attachment.session, attachment.epoch].append(attachment)
    for ones in by_session.values():
        for former in ones:
            for later in ones:
                if not _is_before(former, later) or former.last_seq <= later.log_end:
                    continue
                same = former.replica == later.replica
                detail = (
                    f"came from {former.replica} at {former.last_s:.3f} s, attached since event"
                    f" {former.log_end}, {former.answered_s:.3f} s, but {later.name} was attached"
                    f" to {later.replica} since event {later.log_end}, {later.answered_s:.3f} s"
                )
                kind = "two readers" if same else "two holders"
                yield _problem(kind, former, former.last_seq, detail)


def _is_before(former: Attachment, later: Attachment) -> bool:
    """Whether it was surely attached first: the log was shorter, or it was answered by then."""
    if former is later:
        return False
    if former.log_end != later.log_end:
        return former.log_end < later.log_end
    return former.answered_s < later.asked_s


def other_tokens(
    union: Union,
    log: Log,
    scripts: Mapping[str, int],
    expected: Mapping[int, Sequence[Event]],
) -> Iterator[Problem]:
    """What was seen, and what was logged, is to the bit what it is without faults."""
    for key, seen in union.items():
        events = (one.event for one in seen.values())
        yield from _unlike(key, events, expected[scripts[key[0]]], "seen")
    for key, entries in log.items():
        if key[0] in scripts:
            yield from _unlike(key, entries, expected[scripts[key[0]]], "logged")


def _unlike(
    key: Key, events: Iterable[Event], wanted: Sequence[Event], how: str
) -> Iterator[Problem]:
    for event in events:
        due = wanted[event.seq - 1] if 1 <= event.seq <= len(wanted) else None
        if event != due:
            detail = f"{how} {event}, without faults it is {due}"
            yield Problem("other tokens", *key, event.seq, None, detail)


def unfinished(
    union: Union,
    scripts: Mapping[str, int],
    expected: Mapping[int, Sequence[Event]],
    finished: Iterable[str],
) -> Iterator[Problem]:
    """Of a session that was read to its end, somebody saw each event."""
    num_seen: defaultdict[str, int] = defaultdict(int)
    for (session, _), seen in union.items():
        num_seen[session] = max(num_seen[session], len(seen))
    for session in finished:
        due = len(expected[scripts[session]])
        if num_seen[session] != due:
            detail = f"{num_seen[session]} events were seen, without faults there are {due}"
            yield Problem("not whole", session, "any", num_seen[session], None, detail)


def strangers(scripts: Mapping[str, int], log: Iterable[Key]) -> Iterator[Problem]:
    """Each session in the log is a client's: none was begun twice for the same work.

    Not in a lost store: what was committed there, and lost before its client was told, the client
    begins again in the next one.
    """
    for session, epoch in log:
        if session not in scripts:
            yield Problem("begun twice", session, epoch, 0, None, "no client has been told of it")


def _problem(kind: str, attachment: Attachment, seq: int, detail: str) -> Problem:
    return Problem(kind, attachment.session, attachment.epoch, seq, attachment.name, detail)
