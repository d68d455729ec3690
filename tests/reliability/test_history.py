"""The history checker finds every planted fault, where it was planted, and nothing else."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.types import Finished, TokenEvent, Usage
from tests.reliability.history import (
    Epoch,
    Event,
    History,
    Log,
    Problem,
    Reader,
    event_of_entry,
    event_of_frame,
)


@dataclass
class Run:
    """Nothing went wrong in it: two sessions, readers that resumed, holders that changed."""

    log: dict[tuple[str, Epoch], list[Event]]
    readers: list[list[tuple[str, Epoch, int, list[Event]]]]  # holder, epoch, after, events
    held: list[tuple[str, str, Epoch, int]]
    sessions: list[str]

    def history(self) -> History:
        history = History()
        for span in self.held:
            history.held(*span)
        for index, attachments in enumerate(self.readers):
            reader = history.reader(f"r{index}", self.sessions[index])
            for holder, epoch, after_seq, events in attachments:
                reader.attach(epoch, after_seq, holder)
                for event in events:
                    reader.saw(event)
        return history

    def problems(self) -> list[Problem]:
        return self.history().problems(self.log, decode=decode)


def decode(token_ids: object) -> str:
    assert isinstance(token_ids, list)
    return bytes(token_ids).decode(errors="replace")


def good_run(rng: random.Random) -> Run:
    run = Run({}, [], [], [])
    for session in ("s0", "s1"):
        events = session_log(rng)
        epoch: Epoch = rng.choice([1, 2])
        run.log[session, epoch] = events
        changes = sorted(rng.sample(range(1, len(events) - 1), 2))
        spans = [("A", 0), ("B", changes[0]), ("C", changes[1])]
        run.held += [(session, holder, epoch, after_seq) for holder, after_seq in spans]
        for _ in range(2):
            run.sessions.append(session)
            run.readers.append([])
            at = 0
            for index, (holder, _) in enumerate(spans):
                # Each holder is read up to somewhere before the next one's first event.
                logged = spans[index + 1][1] if index < 2 else len(events)
                upto = logged if index == 2 else rng.randint(max(at, 1), logged)
                run.readers[-1].append((holder, epoch, at, events[at:upto]))
                at = upto
    return run


def session_log(rng: random.Random) -> list[Event]:
    """Three generations of one session with nothing fed between them."""
    events: list[Event] = []
    position = 5
    for _ in range(3):
        for _ in range(rng.randint(2, 6)):
            token = rng.randrange(97, 123)
            events.append(Event(len(events) + 1, position, token, chr(token)))
            position += 1
        events.append(Event(len(events) + 1, position, None, "", "length"))
    return events


def place(run: Run, rng: random.Random, at_least: int = 1) -> tuple[int, int, int]:
    """A reader, one of its attachments with so many events, and one of those events."""
    places = [
        (reader, attachment)
        for reader, attachments in enumerate(run.readers)
        for attachment, (*_, events) in enumerate(attachments)
        if len(events) >= at_least
    ]
    reader, attachment = rng.choice(places)
    return reader, attachment, rng.randrange(len(run.readers[reader][attachment][3]))


Fault = Callable[[Run, random.Random], tuple[str, int, str | None]]


def lose_an_event(run: Run, rng: random.Random) -> tuple[str, int, str | None]:
    reader, attachment, index = place(run, rng, 2)
    events = list(run.readers[reader][attachment][3])
    index = min(index, len(events) - 2)
    lost = events.pop(index)
    set_events(run, reader, attachment, events)
    return "gap", lost.seq + 1, f"r{reader}"


def lose_the_end(run: Run, rng: random.Random) -> tuple[str, int, str | None]:
    reader = rng.randrange(len(run.readers))
    events = list(run.readers[reader][-1][3])
    lost = events.pop()
    set_events(run, reader, -1, events)
    return "never delivered", lost.seq, f"r{reader}"


def repeat_an_event(run: Run, rng: random.Random) -> tuple[str, int, str | None]:
    reader, attachment, index = place(run, rng)
    events = list(run.readers[reader][attachment][3])
    events.insert(index, events[index])
    set_events(run, reader, attachment, events)
    return "duplicate", events[index].seq, f"r{reader}"


def repeat_after_a_resume(run: Run, rng: random.Random) -> tuple[str, int, str | None]:
    reader = rng.randrange(len(run.readers))
    holder, epoch, after_seq, events = run.readers[reader][2]
    key = (run.sessions[reader], epoch)
    again = run.log[key][after_seq - 1]
    run.readers[reader][2] = (holder, epoch, after_seq, [again, *events])
    return "duplicate", again.seq, f"r{reader}"


def swap_two_events(run: Run, rng: random.Random) -> tuple[str, int, str | None]:
    reader, attachment, index = place(run, rng, 2)
    events = list(run.readers[reader][attachment][3])
    index = min(index, len(events) - 2)
    events[index : index + 2] = events[index + 1], events[index]
    set_events(run, reader, attachment, events)
    return "duplicate", events[index + 1].seq, f"r{reader}"


def change_a_token(run: Run, rng: random.Random) -> tuple[str, int, str | None]:
    return change(run, rng, token_id=1)


def change_a_text(run: Run, rng: random.Random) -> tuple[str, int, str | None]:
    return change(run, rng, text="other")


def change_a_position(run: Run, rng: random.Random) -> tuple[str, int, str | None]:
    return change(run, rng, position=10**6)


def change_an_end(run: Run, rng: random.Random) -> tuple[str, int, str | None]:
    return change(run, rng, finish_reason="cancelled")


def change(run: Run, rng: random.Random, **fields: Any) -> tuple[str, int, str | None]:
    reader, attachment, index = place(run, rng)
    events = list(run.readers[reader][attachment][3])
    events[index] = events[index]._replace(**fields)
    set_events(run, reader, attachment, events)
    return "differs from the log", events[index].seq, f"r{reader}"


def send_what_is_not_logged(run: Run, rng: random.Random) -> tuple[str, int, str | None]:
    reader = rng.randrange(len(run.readers))
    events = list(run.readers[reader][-1][3])
    last = events[-1]
    events.append(Event(last.seq + 1, last.position, 97, "a"))
    set_events(run, reader, -1, events)
    return "not in the log", last.seq + 1, f"r{reader}"


def send_after_losing_the_session(run: Run, rng: random.Random) -> tuple[str, int, str | None]:
    """The right tokens, in order: only that A should not have made them."""
    reader = rng.randrange(len(run.readers))
    _, epoch, after_seq, events = run.readers[reader][2]
    run.readers[reader][2] = ("A", epoch, after_seq, events)
    lost_at = next(span[3] for span in run.held if span[:2] == (run.sessions[reader], "B"))
    return "two holders", max(events[0].seq, lost_at + 1), f"r{reader}"


def go_back_to_an_old_epoch(run: Run, rng: random.Random) -> tuple[str, int, str | None]:
    reader = rng.randrange(len(run.readers))
    run.readers[reader].insert(1, ("A", "new", 0, []))
    return "epoch", 0, f"r{reader}"


def lose_a_log_entry(run: Run, rng: random.Random) -> tuple[str, int, str | None]:
    key, events = rng.choice(list(run.log.items()))
    index = rng.randrange(1, len(events) - 1)
    run.log[key] = events[:index] + events[index + 1 :]
    return "log gap", events[index + 1].seq, None


def log_another_text(run: Run, rng: random.Random) -> tuple[str, int, str | None]:
    key, events = rng.choice(list(run.log.items()))
    run.log[key] = [events[0]._replace(text="?"), *events[1:]]
    return "text", events[-1].seq, None


def log_a_position_twice(run: Run, rng: random.Random) -> tuple[str, int, str | None]:
    key, events = rng.choice(list(run.log.items()))
    changed = events[1]._replace(position=events[0].position)
    run.log[key] = [events[0], changed, *events[2:]]
    return "position", changed.seq, None


def set_events(run: Run, reader: int, attachment: int, events: list[Event]) -> None:
    holder, epoch, after_seq, _ = run.readers[reader][attachment]
    run.readers[reader][attachment] = (holder, epoch, after_seq, events)


FAULTS: list[Fault] = [
    lose_an_event,
    lose_the_end,
    repeat_an_event,
    repeat_after_a_resume,
    swap_two_events,
    change_a_token,
    change_a_text,
    change_a_position,
    change_an_end,
    send_what_is_not_logged,
    send_after_losing_the_session,
    go_back_to_an_old_epoch,
    lose_a_log_entry,
    log_another_text,
    log_a_position_twice,
]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_history_without_fault_has_no_problem(seed: int) -> None:
    run = good_run(random.Random(seed))
    assert run.problems() == []
    run.history().check(run.log)


@pytest.mark.parametrize("fault", FAULTS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_planted_fault_is_found_where_it_was_planted(fault: Fault, seed: int) -> None:
    rng = random.Random(seed)
    run = good_run(rng)
    kind, seq, reader = fault(run, rng)
    problems = run.problems()
    assert (kind, seq, reader) in {(found.kind, found.seq, found.reader) for found in problems}
    with pytest.raises(AssertionError, match=kind):
        run.history().check(run.log, decode=decode)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_fault_of_one_reader_is_not_blamed_on_another(seed: int) -> None:
    rng = random.Random(seed)
    run = good_run(rng)
    _, _, reader = repeat_an_event(run, rng)
    assert {found.reader for found in run.problems()} == {reader}


def test_incomplete_reader_is_a_problem_only_where_all_is_asked_for() -> None:
    run = good_run(random.Random(1))
    lose_the_end(run, random.Random(1))
    history = run.history()
    history.check(run.log, complete=False)
    with pytest.raises(AssertionError, match="never delivered"):
        history.check(run.log)


def test_reader_gives_the_cursor_for_a_resume() -> None:
    reader = Reader("r", "s")
    assert reader.last_seq == 0
    reader.attach(1, 7)
    assert reader.last_seq == 7
    reader.saw(Event(8, 3, 1, "a"))
    assert reader.last_seq == 8


def test_frames_and_log_entries_make_the_same_events() -> None:
    token = TokenEvent("q", 3, 9, 65, "A")
    frame = {"type": "token", "request_id": "x", **token._asdict()}
    assert event_of_frame(frame) == event_of_entry(token) == Event(3, 9, 65, "A")
    end = Finished("q", "s", 4, 10, "rest", "stop", Usage(1, 1))
    frame = {"type": "finished", **dataclasses.asdict(end)}
    assert event_of_frame(frame) == event_of_entry(end) == Event(4, 10, None, "rest", "stop")
    assert event_of_frame({"type": "started", "session": "s"}) is None


def test_log_may_have_a_prompt_between_generations_and_only_there() -> None:
    end = Event(2, 4, None, "", "length")
    log: Log = {("s", 1): [Event(1, 3, 97, "a"), end, Event(3, 9, 98, "b")]}
    assert History().problems(log) == []
    log = {("s", 1): [Event(1, 3, 97, "a"), Event(2, 9, 98, "b")]}
    assert [found.kind for found in History().problems(log)] == ["position"]
