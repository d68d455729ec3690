from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from server.engine.session import Opened, Record, SessionValue
from server.engine.types import TokenEvent
from server.errors import RequestError, SessionNotFound
from server.runtime.commands import Command
from server.runtime.queues import CommandQueue, DeliveryQueue, EngineStep, StoreQueue
from server.runtime.threads import MAINTENANCE_S, SOON_S, StoreThread
from server.store.base import Fenced, Store, StoreError, StoreFailed, StoreFull, StoreLost
from tests.server.failing_store import FailingStore
from tests.server.running_engine import HereAndNow

OPENED: Record = ("s", Opened(SessionValue("s", "me")))


def token(seq: int) -> Record:
    return "s", TokenEvent("r", seq, seq, 65, "A")


class Forgetful:
    """Stands for an engine that is told to forget."""

    def __init__(self) -> None:
        self.forgotten: list[tuple[RequestError, str | None]] = []
        self.kept = self

    def discard(self, error: RequestError, id: str | None = None) -> None:
        self.forgotten.append((error, id))


class Desk:
    """A store thread between its queues, and all that it says."""

    def __init__(self, store: FailingStore) -> None:
        self.store = store
        self.clock = [0.0]
        self.passed: list[EngineStep] = []
        self.threads: list[str] = []
        self.died = threading.Event()
        self.queue = StoreQueue()
        self.commands: CommandQueue[Command] = CommandQueue(99)
        self.delivery = DeliveryQueue(self._deliver, self.died.set)
        self.delivery.open(HereAndNow())  # type: ignore[arg-type]
        self.thread = StoreThread(
            store, lambda: self.clock[0], self.queue, self.commands, self.delivery
        )

    def _deliver(self) -> None:
        steps = self.delivery.take()
        self.threads += [threading.current_thread().name] * len(steps)
        self.passed += steps

    def forgotten(self) -> list[tuple[int | None, RequestError, str | None]]:
        """What the engine has been told to forget since this was asked, and as of when."""
        engine, commands = Forgetful(), self.commands.take(0.0) or []
        for command in commands:
            command.call(engine, 0.0)  # type: ignore[arg-type]
        return [(c.generation, *f) for c, f in zip(commands, engine.forgotten, strict=True)]

    def add(self, *records: Record, generation: int = 0) -> EngineStep:
        """As the engine thread does it."""
        step = EngineStep(generation, records=list(records))
        self.delivery.reserve(1)
        if not self.queue.add(step):
            self.delivery.put(step)
        return step

    def answer(self, *commands: Command) -> EngineStep:
        """Adds a step of answers alone, which the store thread has to see."""
        step = EngineStep(0, commands=list(commands))
        self.delivery.reserve(1)
        assert self.queue.add(step)
        return step

    def done(self) -> None:
        """Returns when all that was added has been worked on."""
        self.queue.ask(lambda store: None).result(60)

    def maintained(self, after_s: float = MAINTENANCE_S) -> None:
        """Lets the store's upkeep come round: the second question comes after it."""
        self.clock[0] += after_s
        self.done()
        self.done()


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk(FailingStore())
    desk.thread.start()
    yield desk
    desk.store.unblock()
    assert desk.thread.close(60)
    assert desk.store.is_closed


def seqs(desk: Desk) -> list[int]:
    return [event.seq for event in desk.store.read("s", "me", 0, 100)]


def test_step_without_records_is_published_at_once(desk: Desk) -> None:
    step = desk.add()
    assert desk.passed == [step]
    assert desk.threads == [threading.current_thread().name]


def test_step_is_published_only_after_its_commit(desk: Desk) -> None:
    desk.store.hold()
    step = desk.add(OPENED)
    assert desk.store.held.wait(60)
    assert desk.passed == []
    desk.store.unblock()
    desk.done()
    assert desk.passed == [step]
    assert desk.store.num_committed == [1]


def test_order_is_kept_also_by_steps_with_nothing_to_log(desk: Desk) -> None:
    desk.store.hold()
    steps = [desk.add(OPENED), desk.add(), desk.add(token(1)), desk.add(), desk.add(token(2))]
    assert desk.store.held.wait(60)
    assert desk.passed == []
    desk.store.unblock()
    desk.done()
    assert [id(step) for step in desk.passed] == [id(step) for step in steps]
    assert seqs(desk) == [1, 2]


def test_store_with_more_to_do_is_called_again_soon(desk: Desk) -> None:
    desk.store.has_more = True
    desk.maintained(SOON_S)
    assert desk.store.num_maintained == 0
    desk.maintained()
    desk.maintained(SOON_S)
    assert desk.store.num_maintained == 2
    desk.store.has_more = False
    desk.maintained(SOON_S)
    desk.maintained(SOON_S)
    assert desk.store.num_maintained == 3


def test_replaced_store_makes_the_engine_forget(desk: Desk) -> None:
    """Also where nothing was written since: what the engine has is no part of it."""
    desk.add(OPENED)
    desk.done()
    desk.store.store_id = "another"
    desk.done()
    assert desk.thread.store_id == "another"
    ((generation, error, _),) = desk.forgotten()
    assert generation == desk.thread.generation == 1
    assert isinstance(error, StoreLost)
    desk.add(token(1))
    desk.add(("t", Opened(SessionValue("t", "me"))), generation=1)
    desk.done()
    assert [bool(step.lost) for step in desk.passed] == [False, True, False]


def test_all_steps_that_wait_are_one_commit(desk: Desk) -> None:
    desk.store.hold()
    desk.add(OPENED)
    assert desk.store.held.wait(60)
    for seq in range(1, 6):
        desk.add(token(seq))
    desk.store.unblock()
    desk.done()
    assert desk.store.num_committed == [1, 5]


def test_query_sees_all_earlier_records_and_no_later_ones(desk: Desk) -> None:
    desk.store.hold()
    desk.add(OPENED, token(1))
    assert desk.store.held.wait(60)
    answer = desk.queue.ask(lambda store: store.read("s", "me", 0, 100))
    desk.add(token(2))
    desk.store.unblock()
    assert [event.seq for event in answer.result(60)] == [1]
    desk.done()
    assert seqs(desk) == [1, 2]


def test_error_of_a_query_reaches_only_its_caller(desk: Desk) -> None:
    with pytest.raises(SessionNotFound):
        desk.queue.ask(lambda store: store.read("nothing", "me", 0, 1)).result(60)
    with pytest.raises(ZeroDivisionError):
        desk.queue.ask(lambda store: 1 // 0).result(60)
    desk.done()
    assert desk.thread.error is None


def test_cancelled_query_does_not_run(desk: Desk) -> None:
    asked: list[int] = []
    desk.store.hold()
    desk.add(OPENED)
    assert desk.store.held.wait(60)
    assert desk.queue.ask(lambda store: asked.append(1)).cancel()
    desk.store.unblock()
    desk.done()
    assert asked == []


def test_failed_commit_drops_its_steps_and_makes_the_engine_forget(desk: Desk) -> None:
    desk.add(OPENED)
    desk.done()
    desk.store.error = StoreFull("no room")
    lost, other = desk.add(token(1)), desk.add()
    desk.done()
    assert lost.lost == {"s": desk.store.error}
    assert other.lost == {}
    assert [step.lost for step in desk.passed] == [{}, {"s": desk.store.error}, {}]
    assert desk.forgotten() == [(1, desk.store.error, None)]
    assert desk.thread.error is desk.store.error
    assert not desk.died.is_set()


def test_answer_about_a_session_whose_records_are_lost_is_an_error(desk: Desk) -> None:
    desk.add(OPENED)
    desk.done()
    desk.store.error = StoreFailed("a write failed")
    desk.store.hold()
    seen = Command(lambda engine, now: None, result=1, logged=frozenset("s"))
    other = Command(lambda engine, now: None, result=1)
    desk.add(token(1))
    assert desk.store.held.wait(60)
    step = desk.answer(seen, other)
    desk.store.unblock()
    desk.done()
    step.lose()
    assert (seen.error, other.error) == (desk.store.error, None)


def test_session_seen_after_its_records_were_lost_is_an_error_before_the_engine_forgets(
    desk: Desk,
) -> None:
    desk.add(OPENED)
    desk.done()
    error = desk.store.error = StoreFailed("a write failed")
    desk.add(token(1))
    desk.done()
    seen = Command(lambda engine, now: None, result=1, logged=frozenset("s"))
    step = desk.answer(seen)
    desk.done()
    step.lose()
    assert seen.error is error


def test_what_the_engine_made_before_it_forgot_is_lost_even_if_the_store_works_again(
    desk: Desk,
) -> None:
    desk.add(OPENED)
    desk.done()
    error = desk.store.error = StoreFailed("a write failed")
    desk.add(token(1))
    desk.done()
    desk.store.error = None
    late, unkept = desk.add(token(2)), desk.add()
    desk.done()
    assert (late.lost, unkept.lost) == ({"s": error}, {})
    assert seqs(desk) == []
    new = desk.add(token(1), generation=1)
    desk.done()
    assert new.lost == {}
    assert seqs(desk) == [1]


def test_store_that_works_again_is_noticed_by_its_upkeep(desk: Desk) -> None:
    desk.store.error = StoreFailed("a write failed")
    desk.add(OPENED)
    desk.maintained()
    assert desk.thread.error is desk.store.error
    desk.store.error = None
    desk.maintained()
    assert desk.thread.error is None
    assert len(desk.forgotten()) == 1


def test_failing_upkeep_is_a_failure_too_and_is_counted_once(desk: Desk) -> None:
    desk.store.error = StoreFailed("a sync failed")
    desk.maintained()
    desk.maintained()
    assert desk.store.num_maintained == 2
    assert desk.thread.error is desk.store.error
    assert desk.forgotten() == [(1, desk.store.error, None)]


def test_upkeep_comes_once_a_second_and_not_with_every_commit(desk: Desk) -> None:
    for _ in range(5):
        desk.done()
    assert desk.store.num_maintained == 0
    desk.maintained()
    assert desk.store.num_maintained == 1


def test_fenced_store_ends_the_thread_at_a_commit(desk: Desk) -> None:
    desk.store.error = Fenced("another process has the store")
    lost = desk.add(OPENED)
    assert desk.died.wait(60)
    desk.done()
    assert lost.lost == {"s": desk.store.error}


@pytest.mark.parametrize("before", [None, StoreFull("no room")])
def test_fenced_store_ends_the_thread_at_its_maintenance(
    desk: Desk, before: StoreError | None
) -> None:
    if before is not None:
        desk.store.error = before
        desk.maintained()
        assert not desk.died.is_set()
    desk.store.error = Fenced("another process has the store")
    desk.maintained()
    assert desk.died.is_set()
    assert desk.thread.error is desk.store.error


def test_new_name_of_the_store_is_known_after_its_upkeep(desk: Desk) -> None:
    desk.store.store_id = "feed"
    assert desk.thread.store_id != "feed"
    desk.maintained()
    assert desk.thread.store_id == "feed"


def test_time_of_a_commit_that_hangs_is_shown(desk: Desk) -> None:
    desk.clock[0] = 7.0
    desk.store.hold()
    desk.add(OPENED)
    assert desk.store.held.wait(60)
    assert desk.thread.working_since == 7.0
    desk.store.unblock()
    desk.done()


def test_close_commits_pending_steps_and_refuses_queries() -> None:
    desk = Desk(FailingStore())
    desk.add(OPENED, token(1))
    desk.thread.start()
    assert desk.thread.close(60)
    assert desk.store.num_committed == [2]
    assert len(desk.passed) == 1
    with pytest.raises(StoreError, match="closed"):
        desk.queue.ask(lambda store: None).result(60)


def test_close_reports_a_hanging_commit() -> None:
    desk = Desk(FailingStore())
    desk.store.hold()
    desk.add(OPENED)
    desk.thread.start()
    assert desk.store.held.wait(60)
    assert not desk.thread.close(0.0)
    desk.store.unblock()
    assert desk.thread.close(60)


def test_unexpected_error_ends_the_thread() -> None:
    class Broken(FailingStore):
        def commit(self, records: Sequence[Any]) -> None:
            raise ZeroDivisionError

    desk = Desk(Broken())
    desk.thread.start()
    desk.add(OPENED)
    assert desk.died.wait(60)
    assert desk.thread.close(60)
    assert isinstance(desk.thread.error, StoreError)
    assert desk.passed == []


def test_queries_are_answered_if_the_thread_dies() -> None:
    """With an error; a caller that waits for one of them would wait until the process ends."""
    reached, go_on = threading.Event(), threading.Event()

    def crash(store: Store) -> None:
        reached.set()
        go_on.wait()
        raise SystemExit

    desk = Desk(FailingStore())
    desk.thread.start()
    first = desk.queue.ask(crash)
    assert reached.wait(60)
    second = desk.queue.ask(lambda store: store.store_id)
    go_on.set()
    for question in (first, second):
        with pytest.raises(StoreError, match="store thread has stopped"):
            question.result(60)
    assert desk.died.wait(60)
    assert desk.thread.close(60)
