from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.scheduler import PREFILL_TOKENS, Scheduler
from tests.tiny import request, tiny_engine, tokens_of


@dataclass(eq=False)
class Job:
    position: int
    num_unfed: int
    name: str = ""


def scheduler(*jobs: Job, max_running: int = 100) -> Scheduler[Job]:
    result: Scheduler[Job] = Scheduler((64, 16), max_running=max_running, max_waiting=100)
    for job in jobs:
        result.add(job)
    result.admit()
    return result


@pytest.mark.parametrize(
    ("position", "num_unfed", "size"),
    [
        (0, 200, 64),
        (0, 63, 16),
        (0, 15, 0),
        (64, 64, 64),
        (64, 20, 16),
        (16, 200, 16),
        (48, 200, 16),
        (1, 200, 0),
        (63, 200, 0),
        (128, 1, 0),
    ],
)
def test_chunks_lie_on_the_grid(position: int, num_unfed: int, size: int) -> None:
    job = Job(position, num_unfed)
    plan = scheduler(job).plan()
    assert (plan.chunks, plan.steps) == (([job], []) if size else ([], [job]))
    assert plan.chunk_size == (size or 1)


def test_bounded_chunks_beside_all_steps() -> None:
    decoding = [Job(i, 1) for i in range(10)]
    prompts = [Job(0, 1000) for _ in range(5)]
    short = [Job(0, 20) for _ in range(12)]
    schedule = scheduler(*prompts, *short, *decoding)
    for size in (64, 64, 64, 16, 16, 64):
        plan = schedule.plan()
        assert plan.steps == decoding
        assert plan.chunk_size == size
        assert len(plan.chunks) * size <= PREFILL_TOKENS
        for job in plan.chunks:
            job.position, job.num_unfed = job.position + size, job.num_unfed - size
        decoding += [job for job in plan.chunks if job in short]


def test_long_prompts_take_turns() -> None:
    jobs = [Job(0, 64 * 50, name) for name in "abc"]
    schedule = scheduler(*jobs)
    order = ""
    for _ in range(6):
        for job in schedule.plan().chunks:
            job.position += 64
            job.num_unfed -= 64
            order += job.name
    assert order == "abcabcabcabc"


def test_first_come_first_served_up_to_the_bound() -> None:
    jobs = [Job(0, 1, name) for name in "abcd"]
    schedule = scheduler(*jobs, max_running=2)
    assert list(schedule.running) == jobs[:2]
    schedule.remove(jobs[0])
    assert schedule.admit() == [jobs[2]]
    schedule.remove(jobs[3])  # waiting
    assert list(schedule.running) == [jobs[1], jobs[2]]
    assert not schedule.waiting


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 400)), min_size=1, max_size=12))
def test_everybody_gets_through(prompts: list[tuple[int, int]]) -> None:
    """Each step serves every running job but those that wait for their turn with a chunk."""
    schedule = scheduler(*(Job(position, unfed) for position, unfed in prompts))
    bound = sum(unfed for _, unfed in prompts) + 1
    for _ in range(bound):
        if not schedule.running:
            break
        plan = schedule.plan()
        for job in plan.chunks:
            assert job.position % plan.chunk_size == 0
            job.position += plan.chunk_size
            job.num_unfed -= plan.chunk_size
        for job in plan.steps:
            job.position, job.num_unfed = job.position + 1, job.num_unfed - 1
        assert plan.chunks or plan.steps
        for job in [job for job in schedule.running if job.num_unfed == 0]:
            schedule.remove(job)
    assert not schedule.running


def test_long_prompt_never_stalls_the_streams_of_others() -> None:
    """While prompts of thousands of tokens are read, every other stream gets a token each step."""
    engine = tiny_engine()
    engine.submit(request("stream", max_tokens=100), 0.0)
    while not tokens_of(engine.step(0.0)):
        pass
    for i in range(4):
        engine.submit(request(f"long-{i}", [7] * 2000, max_tokens=1), 0.0)
    for _ in range(60):
        assert tokens_of(e for e in engine.step(0.0) if e.request_id == "stream")
    assert engine.stats().num_running == 5
    first = {e.request_id for _ in range(400) for e in engine.step(0.0) if tokens_of([e])}
    assert {f"long-{i}" for i in range(4)} <= first


def test_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    engine = tiny_engine()
    engine.submit(request("long", [7] * 6400, max_tokens=1), 0.0)
    engine.step(0.0)
    engine.submit(request("short", [7] * 127, max_tokens=1), 0.0)
    steps = 0
    while not tokens_of(e for e in engine.step(0.0) if e.request_id == "short"):
        steps += 1
    assert steps <= 2 + 4 + 16  # its chunks in turn, then the rest token by token
