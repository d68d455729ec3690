"""What a user of a real server waits for: sessions that wake, are resumed, or outlive a restart."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.process import ServerProcess
from benchmarks.sessions.report import Row, Target, times
from clients.python import Client, Session

PROMPT = "Once upon a time there was a little girl who lived in a house by the sea"
WAKE_P99_MS = 20.0
READY_S = 2.0
FORKS_AT_ONCE = 1000
MISSED_TOKENS = 256
MAX_TOKENS = 1_000_000


def flags(folder: Path, *more: str) -> list[str]:
    """Of a server with one thread and a store of full durability."""
    return ["--threads", "1", "--store", str(folder), *more]


def first_token_s(session: Session) -> float:
    """Seconds until a session has written one more token, and ended with it."""
    start = time.perf_counter()
    generation = session.generate(max_tokens=1, temperature=0.0, ignore_eos=True)
    next(generation)
    seconds = time.perf_counter() - start
    generation.text()
    return seconds


def make(client: Client, num: int) -> list[str]:
    """Ids of ``num`` sessions that have read `PROMPT`, forks of one."""
    session = client.create_session()
    session.append(PROMPT)
    ids = [session.id]
    while len(ids) < num:
        ids += [fork.id for fork in session.fork(min(FORKS_AT_ONCE, num - len(ids)))]
    return ids


def wake(folder: Path, num_sessions: int) -> list[Row]:
    """The first token of a session that is on the disk, in memory, or in a slot."""
    options = flags(folder / "wake", "--max-sessions", "4", "--sleep-memory", "512MiB")
    with ServerProcess(*options) as server, Client(server.url) as client:
        ids = make(client, num_sessions)
        for id in ids:  # so that each has a state of its own
            client.session(id).append(f" number {id}")
        server.stop()
    with ServerProcess(*options) as server, Client(server.url) as client:
        client.generate(PROMPT, max_tokens=1).text()  # the first request of a process is slower
        sessions = [client.session(id) for id in random.Random(0).sample(ids, len(ids))]
        disk = [first_token_s(session) for session in sessions]
        memory = [first_token_s(session) for session in sessions]
        awake = [first_token_s(sessions[-1]) for _ in sessions]
    return [
        times("first token, state in a slot", awake),
        times("first token, state in memory", memory),
        times("first token, state on disk", disk, Target(WAKE_P99_MS, of="p99")),
    ]


def resume(folder: Path, rounds: int) -> list[Row]:
    """A client that comes back on a new connection, while nothing runs and while something does."""
    answers, missed, live = [], [], []
    with ServerProcess(*flags(folder / "resume")) as server:
        with Client(server.url) as client:
            idle, busy = client.create_session(), client.create_session()
            idle.generate(PROMPT, max_tokens=MISSED_TOKENS, ignore_eos=True).text()
        for _ in range(rounds):
            with Client(server.url) as client:
                start = time.perf_counter()
                resumed = client.resume(idle.id, 0)
                answers.append(time.perf_counter() - start)
                resumed.text()
                missed.append(time.perf_counter() - start)
        with Client(server.url) as client:
            client.session(busy.id).generate(
                PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True
            ).detach()
        for _ in range(rounds):
            with Client(server.url) as client:
                last_seq = client.session(busy.id).info().seq
                start = time.perf_counter()
                resumed = client.resume(busy.id, last_seq)
                next(resumed)
                live.append(time.perf_counter() - start)
                resumed.detach()
    return [
        times("connect and resume an idle session", answers),
        times(f"and {MISSED_TOKENS} missed events", missed),
        times("connect, resume what runs, and its next token", live),
    ]


def restart(folder: Path, num_sessions: int, rounds: int) -> list[Row]:
    """From the start of a process until it is ready, and until a session continues."""
    options, empty = flags(folder / "restart"), flags(folder / "empty")
    with ServerProcess(*options) as server, Client(server.url) as client:
        ids = make(client, num_sessions)
        server.stop()
    nothing = [_start(empty, None) for _ in range(rounds)]
    drained = [_start(options, id) for id in ids[:rounds]]
    killed = [_start(options, id, is_killed=True) for id in ids[: rounds + 1]][1:]
    name, target = f"{num_sessions:,} sessions", Target(READY_S)
    return [
        Row("ready, empty store", _median(nothing, 0), "s"),
        Row(f"ready, {name}, after a drain", _median(drained, 0), "s", target=target),
        Row("and the first token of one of them", _median(drained, 1), "s"),
        Row(f"ready, {name}, after a kill", _median(killed, 0), "s", target=target),
        Row("and the first token of one of them", _median(killed, 1), "s"),
        Row(f"stop with {name}", _median(drained, 2), "s"),
    ]


def _start(
    options: Sequence[str], session: str | None, is_killed: bool = False
) -> tuple[float, float, float]:
    """Seconds until a server is ready, until a token of ``session``, and that a stop takes."""
    start = time.perf_counter()
    with ServerProcess(*options) as server:
        ready_s = time.perf_counter() - start
        if session is not None:
            with Client(server.url) as client:
                first_token_s(client.session(session))
        token_s = time.perf_counter() - start
        if not is_killed:
            server.stop()
        return ready_s, token_s, time.perf_counter() - start - token_s


def _median(starts: Sequence[tuple[float, float, float]], index: int) -> float:
    return round(statistics.median(one[index] for one in starts), 3)
