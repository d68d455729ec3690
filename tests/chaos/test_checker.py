"""The checker passes what may be, and names each thing that must not be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.chaos.checker import problems
from tests.chaos.record import Attachment, Recording
from tests.reliability.history import Epoch, Event

EXPECTED = [Event(seq, 4 + seq, 96 + seq, chr(96 + seq)) for seq in range(1, 13)] + [
    Event(13, 17, None, "", "length")
]


@dataclass
class Run:
    """One session, read over three replicas: a planned move, a kill, a connection left open."""

    recording: Recording
    log: dict[tuple[str, Epoch], list[Event]]
    finished: set[str] = field(default_factory=lambda: {"s"})
    lost: set[tuple[str, Epoch]] = field(default_factory=set)
    now_s: float = 0.0

    def attach(self, replica: str, after_seq: int, log_end: int, epoch: str = "e") -> Attachment:
        asked_s = self.now_s + 1
        self.now_s += 2
        return self.recording.attach("c", "s", epoch, replica, after_seq, log_end, asked_s)

    def see(self, attachment: Attachment, *seqs: int) -> None:
        for seq in seqs:
            self.now_s += 1
            self.recording.saw(attachment, EXPECTED[seq - 1])

    def kinds(self) -> set[str]:
        found = problems(self.recording, self.log, {0: EXPECTED}, self.finished, self.lost)
        return {problem.kind for problem in found}


def new_run() -> Run:
    recording = Recording(scripts={"s": 0})
    run = Run(recording, {("s", "e"): list(EXPECTED)})
    recording.clock = lambda: run.now_s
    return run


def good_run() -> tuple[Run, Attachment, Attachment, Attachment]:
    run = new_run()
    first = run.attach("A", 0, 0)
    run.see(first, 1, 2, 3)
    # The log was further than the client: what A made and the client has not got.
    second = run.attach("B", 3, 5)
    run.see(second, 4, 5, 6, 7)
    run.see(first, 4, 5)
    third = run.attach("C", 7, 8)
    run.see(third, *range(8, 14))
    return run, first, second, third


def test_late_events_of_a_former_holder_are_allowed_if_it_made_them() -> None:
    run, *_ = good_run()
    assert run.kinds() == set()


def test_session_may_come_back_to_a_replica_that_had_it() -> None:
    run = new_run()
    for index, (replica, upto) in enumerate((("A", 4), ("B", 8), ("A", 13))):
        after = index * 4
        run.see(run.attach(replica, after, after), *range(after + 1, upto + 1))
    assert run.kinds() == set()


Fault = Callable[[Run, Attachment, Attachment, Attachment], None]


def gap(run: Run, first: Attachment, second: Attachment, third: Attachment) -> None:
    run.see(run.attach("C", 7, 13), 9)


def duplicate(run: Run, first: Attachment, second: Attachment, third: Attachment) -> None:
    run.see(third, 13)


def former_holder_goes_on(
    run: Run, first: Attachment, second: Attachment, third: Attachment
) -> None:
    run.see(first, 6)


def former_reader_is_served(
    run: Run, first: Attachment, second: Attachment, third: Attachment
) -> None:
    run.attach("A", 3, 4)
    run.see(first, 6)


def other_token(run: Run, first: Attachment, second: Attachment, third: Attachment) -> None:
    again = run.attach("A", 7, 13)
    run.recording.saw(again, EXPECTED[7]._replace(token_id=1))


def other_text(run: Run, first: Attachment, second: Attachment, third: Attachment) -> None:
    again = run.attach("A", 7, 13)
    run.recording.saw(again, EXPECTED[7]._replace(text="?"))


def other_log(run: Run, first: Attachment, second: Attachment, third: Attachment) -> None:
    run.log["s", "e"][8] = EXPECTED[8]._replace(token_id=1)


def log_lost_its_end(run: Run, first: Attachment, second: Attachment, third: Attachment) -> None:
    del run.log["s", "e"][10:]


def log_has_a_hole(run: Run, first: Attachment, second: Attachment, third: Attachment) -> None:
    del run.log["s", "e"][5]


def silently_another_history(
    run: Run, first: Attachment, second: Attachment, third: Attachment
) -> None:
    run.see(run.attach("A", 3, 5, epoch="f"), 4, 5)


def begun_twice(run: Run, first: Attachment, second: Attachment, third: Attachment) -> None:
    run.log["t", "e"] = list(EXPECTED[:3])


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (gap, "gap"),
        (duplicate, "duplicate"),
        (former_holder_goes_on, "two holders"),
        (former_reader_is_served, "two readers"),
        (other_token, "other event"),
        (other_token, "differs from the log"),
        (other_text, "other event"),
        (other_log, "other tokens"),
        (other_log, "differs from the log"),
        (log_lost_its_end, "not in the log"),
        (log_has_a_hole, "log gap"),
        (silently_another_history, "hole"),
        (silently_another_history, "not in the log"),
        (begun_twice, "begun twice"),
    ],
)
def test_each_fault_is_reported(fault: Fault, kind: str) -> None:
    run, *attachments = good_run()
    fault(run, *attachments)
    assert kind in run.kinds()


def test_missing_events_are_reported() -> None:
    run = new_run()
    run.see(run.attach("A", 0, 0), 1, 2, 3)
    run.see(run.attach("B", 5, 5), *range(6, 14))
    assert {"hole", "never delivered", "not whole"} <= run.kinds()


def test_lost_store_may_have_had_more_than_its_client() -> None:
    run = new_run()
    run.see(run.attach("A", 0, 0), 1, 2, 3)
    run.finished.clear()
    assert run.kinds() == set()


def test_lost_store_may_have_a_session_unknown_to_clients() -> None:
    run, *attachments = good_run()
    begun_twice(run, *attachments)
    run.lost = {("t", "e")}
    assert run.kinds() == set()


def test_two_that_make_the_same_events_are_two_holders() -> None:
    """Both tell the same, as they would from one seed; still only one of them may."""
    run = new_run()
    first, second = run.attach("A", 0, 0), run.attach("B", 0, 0)
    run.see(first, 1, 2)
    run.see(second, *range(1, 14))
    run.see(first, 3)
    assert run.kinds() == {"two holders"}


def test_all_tokens_may_be_alike_over_replicas_and_unlike_the_run_without_faults() -> None:
    run = new_run()
    changed = [event._replace(token_id=7, text="x") for event in EXPECTED[:12]]
    wrong = [*changed, EXPECTED[12]]
    attachment = run.attach("A", 0, 0)
    for event in wrong:
        run.recording.saw(attachment, event)
    run.log["s", "e"] = wrong
    assert run.kinds() == {"other tokens"}


def test_fault_found_by_a_client_is_reported() -> None:
    run, *_ = good_run()
    run.recording.note("silent epoch", "s", "e", 3, "c", "goes on in epoch f")
    assert run.kinds() == {"silent epoch"}
