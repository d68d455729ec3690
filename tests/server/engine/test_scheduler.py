from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.scheduler import DRAFT_TOKENS, PREFILL_TOKENS, TURN_TOKENS, Row, Scheduler
from tests.tiny import request, tiny_engine, tokens_of


@dataclass(eq=False)
class Job:
    position: int
    num_unfed: int
    name: str = ""
    owner: str = "me"
    num_in_turn: int = 0
    num_drafts: int = 0


def scheduler(
    *jobs: Job, max_running: int = 100, grid: tuple[int, ...] = (64, 16)
) -> Scheduler[Job]:
    result: Scheduler[Job] = Scheduler(grid, max_running=max_running, max_waiting=100)
    for job in jobs:
        result.add(job)
    admit(result)
    return result


def admit(schedule: Scheduler[Job]) -> list[Job]:
    """Starts those that wait, as far as the bound allows; who they are."""
    started = []
    while len(schedule.running) < schedule.max_running and (job := schedule.next_waiting()):
        schedule.start(job)
        started.append(job)
    return started


def feed(plan: list[Row[Job]]) -> None:
    """Does what the plan says."""
    for job, size, _ in plan:
        job.position, job.num_unfed = job.position + size, job.num_unfed - size


@pytest.mark.parametrize(
    ("position", "num_unfed", "size"),
    [
        (0, 200, 64),
        (0, 63, 16),
        (0, 15, 1),
        (64, 64, 64),
        (64, 20, 16),
        (16, 200, 16),
        (48, 200, 16),
        (1, 200, 1),
        (63, 200, 1),
        (128, 1, 1),
    ],
)
def test_chunks_lie_on_the_grid(position: int, num_unfed: int, size: int) -> None:
    job = Job(position, num_unfed)
    assert scheduler(job).plan() == [(job, size, 0)]


def test_bounded_chunks_along_with_all_decode_steps() -> None:
    decoding = [Job(i, 1) for i in range(10)]
    prompts = [Job(0, 1000) for _ in range(5)]
    short = [Job(0, 20) for _ in range(12)]
    schedule = scheduler(*prompts, *short, *decoding)
    for size in (64, 64, 64, 16, 16, 64):
        plan = schedule.plan()
        single = [job for job, count, _ in plan if count == 1]
        chunks = [(job, count, 0) for job, count, _ in plan if count > 1]
        assert set(single) == set(decoding)
        assert {count for _, count, _ in chunks} == {size}
        assert len(chunks) * size <= PREFILL_TOKENS
        feed(chunks)
        decoding += [job for job, _, _ in chunks if job in short]


@pytest.mark.parametrize("grid", [(64, 16), (64,)])
def test_long_prompts_take_turns(grid: tuple[int, ...]) -> None:
    jobs = [Job(0, 64 * 50, name) for name in "abc"]
    schedule = scheduler(*jobs, grid=grid)
    order = ""
    for _ in range(6):
        plan = schedule.plan()
        feed(plan)
        order += "".join(job.name for job, _, _ in plan)
    assert order == "abcabcabcabc"


def test_prompts_share_the_bound_where_any_cut_will_do() -> None:
    """As they come; who got some goes to the back, and a single token is always fed."""
    decoding = [Job(i, 1) for i in range(3)]
    prompts = [Job(0, 30, "a"), Job(7, 300, "b"), Job(0, 50, "c"), Job(0, 2, "d")]
    schedule = scheduler(*decoding, *prompts, grid=())
    shares = []
    for _ in range(5):
        plan = schedule.plan()
        feed(plan)
        shares.append("".join(f"{job.name}{size} " for job, size, _ in plan if job.name))
        for job in [job for job in prompts if job in schedule.running and not job.num_unfed]:
            schedule.remove(job)
        for job in decoding:
            assert (job, 1, 0) in plan
            job.num_unfed = 1
    assert shares == ["a30 b98 ", "c50 d2 b76 ", "b126 ", "", ""]
    assert prompts[1].position == 7 + 300


def test_prompt_that_is_left_one_token_keeps_its_turn() -> None:
    jobs = [Job(0, PREFILL_TOKENS - 1, "a"), Job(0, 500, "b"), Job(0, 500, "c")]
    schedule = scheduler(*jobs, grid=())
    plan = schedule.plan()
    assert plan == [(jobs[0], PREFILL_TOKENS - 1, 0), (jobs[1], 1, 0)]
    feed(plan)
    schedule.remove(jobs[0])
    assert schedule.plan() == [(jobs[1], PREFILL_TOKENS, 0)]


def drafting(*jobs: Job, max_drafts: int = 8) -> Scheduler[Job]:
    schedule: Scheduler[Job] = Scheduler((), 100, 100, max_drafts)
    for job in jobs:
        schedule.add(job)
    admit(schedule)
    return schedule


def test_rows_with_drafts_and_prompts_have_bounds_of_their_own() -> None:
    """What rejected drafts have left unfed is fed in any case, and counts as drafts do."""
    prompt, plain = Job(0, 1000), Job(5, 1)
    drafts = [Job(9, 1, num_drafts=8) for _ in range(6)]
    unfed = [Job(9, 5, num_drafts=4) for _ in range(6)]
    plan = drafting(prompt, plain, *drafts, *unfed).plan()
    assert plan[0] == (prompt, PREFILL_TOKENS, 0)
    assert plan[1] == (plain, 1, 0)
    assert plan[2:8] == [(job, 1, 8) for job in drafts]
    rest = [(job, 5, 4 if job in unfed[:2] else 0) for job in unfed]
    assert plan[8:] == rest
    assert sum(num_drafts for _, _, num_drafts in plan) <= DRAFT_TOKENS


def test_short_rows_are_prompts_where_nothing_is_drafted() -> None:
    job = Job(0, 5)
    assert drafting(job, max_drafts=0).plan() == drafting(job, max_drafts=8).plan() == [(job, 5, 0)]
    late = [Job(0, PREFILL_TOKENS), Job(0, 5)]
    assert drafting(*late, max_drafts=0).plan() == [(late[0], PREFILL_TOKENS, 0)]
    assert len(drafting(*late, max_drafts=8).plan()) == 2


def test_first_come_first_served_up_to_the_bound() -> None:
    jobs = [Job(0, 1, name) for name in "abcd"]
    schedule = scheduler(*jobs, max_running=2)
    assert list(schedule.running) == jobs[:2]
    schedule.remove(jobs[0])
    assert admit(schedule) == [jobs[2]]
    schedule.remove(jobs[3])  # waiting
    assert list(schedule.running) == [jobs[1], jobs[2]]
    assert schedule.next_waiting() is None
    assert schedule.num_waiting == 0


def test_owners_take_turns_regardless_of_their_number_of_requests() -> None:
    jobs = [Job(0, 1, f"{owner}{i}", owner) for owner in "ab" for i in range(3)]
    jobs.append(Job(0, 1, "c0", "c"))
    schedule = scheduler(*jobs, max_running=0)
    schedule.max_running = len(jobs)
    assert [job.name for job in admit(schedule)] == ["a0", "b0", "c0", "a1", "b1", "a2", "b2"]


def test_returning_owner_is_queued_behind_the_others() -> None:
    schedule = scheduler(Job(0, 1, "a0", "a"), Job(0, 1, "b0", "b"), max_running=1)
    schedule.add(Job(0, 1, "a1", "a"))
    schedule.max_running = 3
    assert [job.name for job in admit(schedule)] == ["b0", "a1"]


def test_capacity_counts_running_and_waiting_jobs() -> None:
    schedule: Scheduler[Job] = Scheduler((), max_running=1, max_waiting=2)
    for _ in range(3):
        assert schedule.has_room
        schedule.add(Job(0, 1))
    assert not schedule.has_room


def test_preemption_needs_a_waiting_job() -> None:
    fresh, preemptible = Job(0, 1, "fresh"), Job(0, 1, "preemptible", num_in_turn=TURN_TOKENS)
    schedule = scheduler(fresh, preemptible)
    assert schedule.find_preemptible() is None
    schedule.add(Job(0, 1, "new"))
    assert schedule.find_preemptible() is preemptible
    preemptible.num_in_turn -= 1
    assert schedule.find_preemptible() is None


@given(
    st.sampled_from([(64, 16), (16,), ()]),
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 400)), min_size=1, max_size=12),
)
def test_every_job_completes(grid: tuple[int, ...], prompts: list[tuple[int, int]]) -> None:
    """Each step serves every running job but those that wait for their turn with a chunk."""
    schedule = scheduler(*(Job(position, unfed) for position, unfed in prompts), grid=grid)
    bound = sum(unfed for _, unfed in prompts) + 1
    for _ in range(bound):
        if not schedule.running:
            break
        plan = schedule.plan()
        assert plan
        assert len({job for job, _, _ in plan}) == len(plan)
        chunks = [(job, size, 0) for job, size, _ in plan if size > 1]
        assert sum(size for _, size, _ in chunks) <= PREFILL_TOKENS
        assert all(size in grid and job.position % size == 0 for job, size, _ in chunks if grid)
        assert all(0 < size <= job.num_unfed for job, size, _ in plan)
        planned = {job for job, _, _ in plan}
        assert all(job in planned for job in schedule.running if job.num_unfed == 1)
        feed(plan)
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
