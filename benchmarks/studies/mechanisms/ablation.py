"""The driver of the ablation: runs what has no result yet, and says how long the rest takes."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from benchmarks.studies.mechanisms.folder import Folder, RunError
from benchmarks.studies.mechanisms.plan import Job, seconds

Clock = Callable[[], float]


def run_jobs(
    folder: Folder, jobs: list[Job], clock: Clock = time.monotonic, workers: int = 1
) -> list[str]:
    """Runs the jobs that have no result; the names of those that gave none.

    A run that fails does not end the others. Interrupted training continues with the next call.
    ``workers`` processes run jobs side by side, with conversions after all others, whose models
    they convert.
    """
    missing = [job for job in jobs if not folder.result(job.name).is_file()]
    print(_left(len(jobs), missing, 1.0), flush=True)
    left, failed, expected, started = list(missing), [], 0.0, clock()
    for job, error in _outcomes(folder, missing, workers):
        left.remove(job)
        expected += seconds(job, 1.0)
        if error:
            failed.append(job.name)
            print(f"error: {error}", file=sys.stderr, flush=True)
        print(_left(len(jobs), left, (clock() - started) / expected), flush=True)
    return failed


def named(jobs: list[Job], names: list[str]) -> list[Job]:
    """The jobs of these names, in the order of the names.

    Raises `RunError` for a name that no job has.
    """
    known = {job.name: job for job in jobs}
    if unknown := [name for name in names if name not in known]:
        raise RunError(f"--names: no such run: {', '.join(unknown)} (--list shows all)")
    return [known[name] for name in names]


def listed(folder: Folder, jobs: list[Job]) -> str:
    """One line for each job: what it settles, whether it is done, and how long it takes."""
    return "\n".join(
        f"{job.question:<11} {'done' if folder.result(job.name).is_file() else 'open':<5}"
        f" {seconds(job, 1.0) / 60:5.0f} min  {job.name}"
        for job in jobs
    )


def _outcomes(folder: Folder, jobs: list[Job], workers: int) -> Iterator[tuple[Job, str | None]]:
    """Each job as it ends, with the reason where it gave no result."""
    if workers == 1:
        yield from ((job, _run(folder, job)) for job in jobs)
        return
    first = [job for job in jobs if job.question != "conversion"]
    for stage in (first, [job for job in jobs if job.question == "conversion"]):
        with ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)
        ) as pool:
            running = {pool.submit(_run, folder, job): job for job in stage}
            for future in as_completed(running):
                yield running[future], future.result()


def _run(folder: Folder, job: Job) -> str | None:
    try:
        folder.run_once(job.name, job.run)
    except RunError as error:
        return str(error)
    return None


def _left(total: int, missing: list[Job], pace: float) -> str:
    hours = sum(seconds(job, pace) for job in missing) / 3600
    return f"{total - len(missing)} of {total} runs done, about {hours:.1f} h left"
