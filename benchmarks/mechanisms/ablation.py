"""The driver of the ablation: runs what has no result yet, and says how long the rest takes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from benchmarks.mechanisms.folder import Folder, RunError
from benchmarks.mechanisms.plan import Job, seconds

Clock = Callable[[], float]


def run_jobs(folder: Folder, jobs: list[Job], clock: Clock = time.monotonic) -> list[str]:
    """Runs the jobs that have no result; the names of those that gave none.

    A run that fails does not end the others. Interrupted training continues with the next call.
    """
    missing = [job for job in jobs if not folder.result(job.name).is_file()]
    print(_left(len(jobs), missing, 1.0), flush=True)
    failed, pace, spent, expected = [], 1.0, 0.0, 0.0
    for index, job in enumerate(missing):
        started = clock()
        try:
            folder.run_once(job.name, job.run)
        except RunError as error:
            failed.append(job.name)
            print(f"error: {error}", file=sys.stderr, flush=True)
            continue
        spent, expected = spent + clock() - started, expected + seconds(job, 1.0)
        pace = spent / expected
        print(_left(len(jobs), missing[index + 1 :], pace), flush=True)
    return failed


def listed(folder: Folder, jobs: list[Job]) -> str:
    """One line for each job: what it settles, whether it is done, and how long it takes."""
    return "\n".join(
        f"{job.question:<11} {'done' if folder.result(job.name).is_file() else 'open':<5}"
        f" {seconds(job, 1.0) / 60:5.0f} min  {job.name}"
        for job in jobs
    )


def _left(total: int, missing: list[Job], pace: float) -> str:
    hours = sum(seconds(job, pace) for job in missing) / 3600
    return f"{total - len(missing)} of {total} runs done, about {hours:.1f} h left"
