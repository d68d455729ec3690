"""The two threads: one owns the engine, one owns the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from server.engine.engine import Engine
from server.engine.session import Record
from server.errors import InternalFailure, RequestError
from server.runtime.commands import Absent, Command, forget
from server.runtime.queues import CommandQueue, DeliveryQueue, EngineStep, Question, StoreQueue
from server.store.base import Fenced, RecordRefused, Store, StoreError, StoreLost

# -------------------------------------------------------------------------------------------------
# The thread that owns an engine: commands go in, what each turn has made comes out.
#
# It sleeps while there is nothing to do. When it ends it releases the engine, and so
# of the model and the states: no other thread has them.


engine_logger = logging.getLogger("everstream.engine_thread")


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
            engine_logger.exception("the engine failed")
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
                engine_logger.exception("a command failed")
                command.error = InternalFailure("the engine could not do this")
            if command.result is Absent.ABSENT:
                command.logged = frozenset()  # nothing was seen that the store may lose
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


# -------------------------------------------------------------------------------------------------
# The thread that owns the store: what a step has made is safe before it is delivered.
#
# All steps that wait are one commit, so a slow disk makes larger commits and not
# more of them. Questions to the store come in between, in their turn. When a
# commit fails, the engine discards what it has of kept sessions, and what
# it made of them since is dropped: they continue from what the store has. Where the store
# refuses the records of one session, that happens to this session alone.


store_logger = logging.getLogger("everstream.store_thread")

MAINTENANCE_S = 1.0
#: Where the store has more to do, bit by bit, so that no commit waits for long.
SOON_S = 0.08


class StoreThread:
    """Takes ``queue``; each step goes to ``delivery`` when it is safe, in order.

    After a failure the engine gets a command to forget. Where there is no continuing, as
    another process has the store or after an error of ours, ``delivery`` ends.
    ``error`` says why kept sessions cannot continue at present.
    """

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float],
        queue: StoreQueue,
        command_queue: CommandQueue[Command],
        delivery: DeliveryQueue,
    ) -> None:
        self.error: RequestError | None = None
        self.store_id = store.store_id
        self.working_since: float | None = None
        #: When the engine last forgot all: whatever was asked before it grew may be of no use.
        self.generation = 0
        self._store, self._clock = store, clock
        self._queue, self._command_queue, self._delivery = queue, command_queue, delivery
        self._last_generation = 0
        self._last_error: RequestError | None = None
        #: Sessions that the engine has been told to forget: since when, and why.
        self._refused: dict[str, tuple[int, RequestError]] = {}
        self._maintained_s, self._pause_s = clock(), MAINTENANCE_S
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Commits what waits and gives the store back; False if that took too long."""
        self._queue.close()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The thread

    def _run(self) -> None:
        try:
            while (taken := self._queue.take(self._pause_s)) is not None:
                self.working_since = self._clock()
                steps, question = taken
                self._commit(steps)
                if question is not None:
                    self._answer(question)
                self._maintain()
                self.working_since = None
            self._store.close()
        except BaseException:  # whatever it is, the thread ends
            store_logger.exception("the store thread failed")
            self.error = StoreError("the store thread has stopped")
            self._delivery.end()
            self._queue.fail(self.error)

    def _commit(self, steps: list[EngineStep]) -> None:
        if steps and self._refused:
            self._forget_refused(steps[0].generation)
        records = [record for step in steps for record in self._valid(step)]
        if records:
            try:
                refused = commit_apart(self._store, records)
            except StoreError as error:
                self._fail(error)
            else:
                self._refuse(refused)
            self._note_store()
        for step in steps:
            self._note_lost(step)
            self._delivery.put(step)

    def _valid(self, step: EngineStep) -> list[Record]:
        """The records of ``step`` that the engine has made of sessions as the store has them."""
        if step.generation < self.generation:
            return []
        if not self._refused:
            return step.records
        return [record for record in step.records if not self._is_refused(record[0], step)]

    def _is_refused(self, session: str, step: EngineStep) -> bool:
        return session in self._refused and step.generation < self._refused[session][0]

    def _note_lost(self, step: EngineStep) -> None:
        ids = {id for id, _ in step.records}.union(*(one.logged for one in step.commands))
        if ids and step.generation < self.generation:
            assert self._last_error is not None
            step.lost = dict.fromkeys(ids, self._last_error)
        elif self._refused:
            step.lost = {id: self._refused[id][1] for id in ids if self._is_refused(id, step)}

    def _refuse(self, errors: Mapping[str, StoreError]) -> None:
        """The engine forgets these sessions, and continues with all others."""
        for session, error in errors.items():
            store_logger.error("session %s: %s", session, error)
            self._last_generation += 1
            self._refused[session] = self._last_generation, error
            self._command_queue.post(forget(self._last_generation, error, session), urgent=True)

    def _forget_refused(self, generation: int) -> None:
        """The engine has forgotten those of ``generation`` and before."""
        left = self._refused.items()
        self._refused = {id: refusal for id, refusal in left if refusal[0] > generation}

    def _fail(self, error: StoreError) -> None:
        store_logger.error("the store failed: %s", error)
        self.error = error
        self._forget_all(error)
        self._store.forget()
        if isinstance(error, Fenced):
            self._delivery.end()

    def _forget_all(self, error: RequestError) -> None:
        self._last_generation += 1
        self.generation, self._last_error = self._last_generation, error  # before the engine acts
        self._command_queue.post(forget(self._last_generation, error), urgent=True)

    def _answer(self, question: Question) -> None:
        future = question.future
        if not future.set_running_or_notify_cancel():
            return
        try:
            answer = question.ask(self._store)
        except Exception as error:
            if not isinstance(error, RequestError):
                store_logger.exception("a call to the store failed")
            self._note_store()
            future.set_exception(error)
        else:
            self._note_store()  # first: who is answered knows which store it was
            future.set_result(answer)

    def _note_store(self) -> None:
        """Where the store has become another one, what the engine has is no part of it."""
        if self._store.store_id != self.store_id:
            self.store_id = self._store.store_id
            self._forget_all(StoreLost("the store is another one than before"))

    def _maintain(self) -> None:
        now = self._clock()
        if now - self._maintained_s < self._pause_s:
            return
        self._maintained_s, self._pause_s = now, MAINTENANCE_S
        try:
            if self._store.maintain(now):
                self._pause_s = SOON_S
        except StoreError as error:
            if self.error is None or isinstance(error, Fenced):
                self._fail(error)
        else:
            if self.error is not None:
                store_logger.warning("the store works again")
            self.error = None
        self._note_store()


def commit_apart(store: Store, records: Sequence[Record]) -> dict[str, StoreError]:
    """Commits what the store takes of ``records``; why it refuses the sessions of the others.

    Where it refuses something, the sessions are halved until those at fault are alone.
    Raises what `Store.commit` raises for other reasons, and then part of them may count.
    """
    try:
        store.commit(records)
    except (RecordRefused, StoreLost) as error:
        sessions = list(dict.fromkeys(id for id, _ in records))
        if len(sessions) == 1:
            return {sessions[0]: error}
    else:
        return {}
    first = set(sessions[: len(sessions) // 2])
    return {
        **commit_apart(store, [record for record in records if record[0] in first]),
        **commit_apart(store, [record for record in records if record[0] not in first]),
    }
