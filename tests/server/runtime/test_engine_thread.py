"""Which answers of the engine wait for the store."""

from __future__ import annotations

import threading

import pytest

from server.runtime.commands import Absent, Command, on_session
from server.runtime.queues import CommandQueue, DeliveryQueue, EngineStep, StoreQueue
from server.runtime.threads import EngineThread
from tests.fakes import FakeEngine
from tests.server.running_engine import HereAndNow

TIMEOUT_S = 60.0


class Desk:
    """An engine thread whose store thread does not run: what waits for it is never delivered."""

    def __init__(self) -> None:
        self.delivered: list[EngineStep] = []
        self.came = threading.Event()
        self.queue = StoreQueue()
        self.commands: CommandQueue[Command] = CommandQueue(99)
        self.delivery = DeliveryQueue(self._deliver, lambda: None)
        self.delivery.open(HereAndNow())  # type: ignore[arg-type]
        self.engine = FakeEngine()
        self.thread = EngineThread(
            self.engine, lambda: 0.0, self.queue, self.commands, self.delivery
        )

    def _deliver(self) -> None:
        self.delivered += self.delivery.take()
        self.came.set()

    def end(self) -> None:
        """Returns when all commands have run."""
        self.commands.close()
        assert self.thread.join(TIMEOUT_S)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def asked(session: str) -> Command:
    """A command for a kept session, as the event loop posts it."""
    call = on_session(session, "me", lambda engine, now: "here")
    return Command(call, logged=frozenset((session,)))


def test_answer_that_a_session_is_absent_does_not_wait_for_the_store(desk: Desk) -> None:
    """Its next question goes to the store thread, after all that was to be logged."""
    desk.commands.post(asked("s"))
    desk.thread.start()
    assert desk.came.wait(TIMEOUT_S)
    desk.end()
    (command,) = desk.delivered[0].commands
    assert command.result is Absent.ABSENT


def test_what_was_seen_of_a_session_waits_until_it_is_logged(desk: Desk) -> None:
    session = desk.engine.kept.create("me", 0.0).session
    desk.commands.post(asked(session))
    desk.thread.start()
    desk.end()
    assert desk.delivered == []
    taken = desk.queue.take(0.0)
    assert taken is not None
    ((step,), _) = taken
    assert [command.result for command in step.commands] == ["here"]


def test_absence_waits_where_something_is_logged_already(desk: Desk) -> None:
    """Answers keep their order."""
    session = desk.engine.kept.create("me", 0.0).session
    for command in (asked(session), asked("s")):
        desk.commands.post(command)
    desk.thread.start()
    desk.end()
    assert desk.delivered == []
