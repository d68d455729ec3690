"""The threads of a runtime: they come and go with it, sleep when idle, and leave Python free."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from model.native.runtime import Runtime
from tests.model.ops.cpu.models import Shape, make_model, random_tokens, small_model, small_weights
from tests.weights import weights_of

TASKS = Path("/proc/self/task")


def cpu_time_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def test_threads_end_with_their_runtime() -> None:
    """Those of earlier runtimes and tests may end at any time, and are not counted."""
    for threads in (1, 2, 4, 8) * 5:
        before = set(os.listdir(TASKS))
        runtime = Runtime(*small_weights("elu"), "float32", threads)
        assert runtime.threads == threads
        own = set(os.listdir(TASKS)) - before
        assert len(own) == threads - 1
        if threads == 4:
            runtime.run(runtime.empty_pool(1), [0], [0], [[1, 2]], [None])
        del runtime
        while own & set(os.listdir(TASKS)):  # the kernel lists a joined thread a little longer
            os.sched_yield()


def test_idle_threads_take_no_time() -> None:
    runtime = Runtime(*small_weights("elu"), "float32", threads=4)
    pool, never = runtime.empty_pool(8), threading.Event()
    for position in range(20):
        runtime.run(pool, list(range(8)), [position] * 8, [[position]] * 8, [None] * 8)
    never.wait(0.05)
    before = cpu_time_s()
    never.wait(0.4)
    assert cpu_time_s() - before < 0.1


def test_other_python_threads_run_during_a_run() -> None:
    """One that holds the interpreter would not let the other count before it is done."""
    config = Shape({"hidden_size": 128, "intermediate_size": 512, "vocab_size": 4096}).config("elu")
    runtime = Runtime(config, weights_of(make_model(config)), "float32")
    tokens, pool, done = random_tokens(config, 3000), runtime.empty_pool(1), threading.Event()

    def work() -> None:
        runtime.run(pool, [0], [0], [tokens], [None])
        done.set()

    thread, count = threading.Thread(target=work), 0
    thread.start()
    while not done.is_set():
        count += 1
    thread.join()
    assert count > 10_000


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_runtimes_of_two_python_threads_are_independent(threads: int) -> None:
    names, results = ("gated", "elu"), {}

    def work(name: str) -> None:
        results[name] = stream(name, threads)

    workers = [threading.Thread(target=work, args=(name,)) for name in names]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == {name: stream(name, 1) for name in names}


def stream(name: str, threads: int) -> tuple[list[list[int]], bytes]:
    """Tokens drawn one after the other for eight sessions, and their states."""
    config, weights = small_weights(name)
    runtime = Runtime(config, weights, "float32", threads)
    pool, slots = runtime.empty_pool(8), list(range(8))
    draws = [runtime.draw(seed=slot, temperature=1.5) for slot in slots]
    drawn: list[list[int]] = []
    tokens = [[slot] for slot in slots]
    for position in range(100):
        step = runtime.run(pool, slots, [position] * 8, tokens, draws)
        drawn += step
        tokens = step
    return drawn, pool.tobytes()


def test_late_thread_takes_no_part_in_a_later_run() -> None:
    """Of more threads than cores some come when their run is over and others have begun.

    These have other phases: a long text beyond its windows goes in segments.
    """
    config, weights = small_model("llama-windows")
    text = random_tokens(config, 80)
    single, many = (Runtime(config, weights, "float32", threads) for threads in (1, 16))
    for i in range(300):
        rows = list(range(1 + i % 7))
        states = []
        for runtime in (single, many):
            n = len(rows)
            pool, draws = runtime.empty_pool(n), [runtime.draw(temperature=0.0)] * n
            first = runtime.run(pool, rows, [0] * n, [[1]] * n, draws)
            last = runtime.run(pool, rows, [1] * n, [text[: 80 - i % 13]] * n, draws)
            states.append((first, last, pool.tobytes()))
        assert states[0] == states[1]
