"""The thread that owns an engine: commands go in, what each turn has made comes out.

It sleeps while there is nothing to do. When it ends it releases the engine, and so
of the model and the states: no other thread has them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from server.engine.engine import Engine
from server.engine.value import Record
from server.errors import InternalFailure, RequestError
from server.runtime.command_queue import CommandQueue
from server.runtime.commands import Command
from server.runtime.delivery_queue import DeliveryQueue, EngineStep
from server.runtime.store_queue import StoreQueue

logger = logging.getLogger("everstream.engine_thread")


class EngineThread:
    """Takes commands; gives steps to the store thread or the event loop.

    ``working_since`` is when the turn began that it is at.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float],
        store_queue: StoreQueue,
        command_queue: CommandQueue[Command],
        delivery: DeliveryQueue,
    ) -> None:
        self.working_since: float | None = None
        self._clock, self._command_queue = clock, command_queue
        self._store_queue, self._delivery = store_queue, delivery
        self._generation = 0
        self._told_idle = True
        self._thread = threading.Thread(
            target=self._run, args=(engine,), name="engine", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end; False if it did not come in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The thread

    def _run(self, engine: Engine) -> None:
        try:
            while (commands := self._command_queue.take(self._patience_s(engine))) is not None:
                for some in _by_generation(commands):
                    self._turn(engine, some)
        except BaseException:  # whatever it is, the thread ends
            logger.exception("the engine failed")
            self._delivery.end()

    def _patience_s(self, engine: Engine) -> float | None:
        """How long the thread may wait for a command: without a limit, unless there is work."""
        if engine.has_work():
            return 0.0
        expiry = engine.next_expiry()
        return None if expiry is None else max(0.0, expiry - self._clock())

    def _turn(self, engine: Engine, commands: list[Command]) -> None:
        """Runs ``commands`` and a step of the engine, and passes on what they made, if anything.

        It goes to the store thread, or to the event loop where it has nothing to log.
        """
        now = self.working_since = self._clock()
        if commands and commands[0].generation is not None:
            self._generation = commands[0].generation
        records: list[Record] = []
        for command in commands:
            try:
                command.result = command.call(engine, now)
            except RequestError as error:
                command.error = error
            except Exception:
                logger.exception("a command failed")
                command.error = InternalFailure("the engine could not do this")
            if made := engine.take_records():
                command.logged |= {id for id, _ in made}
                records += made
        events = engine.step(now)
        records += engine.take_records()
        prefixes, usage = engine.take_evicted_prefixes(), engine.take_usage()
        is_idle = not engine.has_work()
        self.working_since = None
        has_news = commands or events or records or prefixes or usage
        if has_news or is_idle != self._told_idle:
            num_places = self._delivery.reserve(engine.longest_row)
            self._told_idle = is_idle
            step = EngineStep(
                *(self._generation, commands, records, events, prefixes, usage),
                freed_bytes=engine.take_freed_bytes(),
                is_idle=is_idle,
                done_s=self._clock(),
                num_places=num_places,
            )
            if not self._store_queue.add(step):
                self._delivery.put(step)


def _by_generation(commands: list[Command]) -> list[list[Command]]:
    """``commands`` in their order, cut before each one that begins a generation."""
    if len(commands) < 2:
        return [commands]
    groups: list[list[Command]] = [[]]
    for command in commands:
        if command.generation is not None and groups[-1]:
            groups.append([])
        groups[-1].append(command)
    return groups
