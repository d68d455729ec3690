"""Minutes of everything that clients do to a server; then every slot must be free again.

Many clients at once, each choosing its next visit at random (`behaviour`):
whole streams, cancels, abrupt disconnects, long prompts, kept and
abandoned sessions, bad requests, and requests whose tokens are known. The pool
is small, so that some are refused. At the end the server must be idle and as
large as after the warm-up, and leave with exit code 0 (`verdict`).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.process import ServerProcess, exit_on_sigterm
from benchmarks.report import Result, command_line, show_figures
from benchmarks.soak.behaviour import LONG_TEXT, PROMPTS, VISITS
from benchmarks.soak.verdict import MIB, Ending, Observation, observe, verdict
from benchmarks.soak.wire import (
    TIMEOUT_S,
    Reference,
    Refused,
    Tally,
    World,
    open_world,
)

IDLE_TIMEOUT_S = 30.0
POLL_S = 0.2
PROBE_S = 0.5
PATIENCE_S = 0.2
REFERENCE_TOKENS = 40
WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Options:
    """How long and how hard. ``warm_up_s`` and ``seconds`` are the two phases of load."""

    seconds: float = 600.0
    warm_up_s: float = 60.0
    streams: int = 32
    max_sessions: int = 40
    session_ttl_s: float = 10.0
    seed: int = 0
    threads: int | None = None
    model: str | None = None
    output: Path | None = None

    def server_flags(self) -> list[str]:
        flags = {
            "--max-sessions": self.max_sessions,
            "--sleep-memory": 0,  # so that a full pool is a full server
            "--session-ttl": self.session_ttl_s,
            "--threads": self.threads,
            "--model": self.model,
        }
        return [part for name, v in flags.items() if v is not None for part in (name, str(v))]


@dataclass(frozen=True)
class Report:
    """What came out. The soak has passed where ``failures`` is empty."""

    tally: Tally
    before: Observation
    warm: Observation
    after: Observation
    failures: list[str]


def soak(options: Options) -> Report:
    """Runs the whole soak against a server of its own."""
    with ServerProcess(*options.server_flags()) as server:
        tally, *observations = asyncio.run(load(server, options))
        ending = Ending(server.stop(), server.log())
    before, warm, after = observations
    return Report(tally, before, warm, after, verdict(before, warm, after, tally, ending))


async def load(
    server: ServerProcess, options: Options
) -> tuple[Tally, Observation, Observation, Observation]:
    """Warm-up and soak; and what was seen before, between and after."""
    tally = Tally()
    before = await observe(server)
    async with open_world(server.url, tally) as world:
        references = await make_references(world)
        for _ in range(WARM_UP_ROUNDS):
            await every_batch_size(world, options.max_sessions)
    async with open_world(server.url, tally, references) as world:
        await crowd(world, options, options.warm_up_s, salt=1)
    warm = await wait_idle(server, before, options)
    async with open_world(server.url, tally, references) as world:
        await crowd(world, options, options.seconds, salt=2)
    await wait_idle(server, before, options)
    async with open_world(server.url, tally) as world:
        await fill_and_empty(world, options.max_sessions)
    after = await wait_idle(server, before, options)
    return tally, before, warm, after


async def make_references(world: World) -> list[Reference]:
    """Requests of several kinds and their tokens, made one at a time."""
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        (PROMPTS[0], {"temperature": 0}),
        (PROMPTS[1], {"temperature": 0.8, "top_p": 0.95}),
        (PROMPTS[2], {"top_k": 40, "repetition_penalty": 1.2}),
        (LONG_TEXT[:2000], {"min_p": 0.02}),
    )
    references = []
    async with world.socket() as socket:
        for seed, (prompt, kind) in enumerate(kinds):
            sampling = {**kind, "seed": seed, "max_tokens": REFERENCE_TOKENS, "ignore_eos": True}
            made = await socket.generate(f"r{seed}", prompt=prompt, **sampling)
            references.append(Reference(prompt, sampling, made.tokens, made.text))
    return references


async def every_batch_size(world: World, max_sessions: int) -> None:
    """As many generations at once as the pool holds, which end one after the other.

    The matrix library and the allocator keep memory for each batch size that
    they have seen: it is had before it is compared.
    """

    async def one(max_tokens: int) -> None:
        async with world.socket() as socket:
            await socket.generate("w", prompt=PROMPTS[0], max_tokens=max_tokens, ignore_eos=True)

    lengths = range(REFERENCE_TOKENS, REFERENCE_TOKENS + max_sessions)
    await asyncio.gather(*(one(max_tokens) for max_tokens in lengths))


async def crowd(world: World, options: Options, seconds: float, salt: int) -> None:
    """All clients at once for ``seconds``, and a probe of the server."""
    print(f"{options.streams} clients for {seconds:g} s ...", file=sys.stderr, flush=True)
    until = time.monotonic() + seconds
    probing = asyncio.create_task(probe(world))
    clients = (
        client(world, Random(f"{options.seed}/{salt}/{number}"), until)
        for number in range(options.streams)
    )
    await asyncio.gather(*clients)
    probing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await probing


async def client(world: World, rng: Random, until: float) -> None:
    """One visit after the other."""
    while time.monotonic() < until and not world.tally.hopeless:
        (visit,) = rng.choices([*VISITS], [*VISITS.values()])
        name = visit.__name__
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await visit(world, rng)
        except Refused as refusal:
            world.tally.refused[refusal.code] += 1
            await asyncio.sleep(rng.uniform(0, PATIENCE_S))
        except Exception as error:
            world.tally.problem(name, error)
        else:
            world.tally.done[name] += 1


async def probe(world: World) -> None:
    """Requests the health routes again and again."""
    while not world.tally.hopeless:
        try:
            for path in ("/health", "/ready"):
                await world.call("GET", path)
            await world.call("GET", "/v1/models")
        except Exception as error:
            world.tally.problem("probe", error)
        await asyncio.sleep(PROBE_S)


async def fill_and_empty(world: World, max_sessions: int) -> None:
    """Every slot of an idle pool can be acquired again, and not one more."""
    try:
        created = [await world.call("POST", "/v1/sessions", json={}) for _ in range(max_sessions)]
        await world.call("POST", "/v1/sessions", status=503, json={})
        for answer in created:
            await world.call("DELETE", f"/v1/sessions/{answer['session']}")
        world.tally.done["fill_and_empty"] += 1
    except Exception as error:
        world.tally.problem("fill_and_empty", error)


async def wait_idle(server: ServerProcess, before: Observation, options: Options) -> Observation:
    """The server when it is idle, or after the time in which it should be."""
    deadline = time.monotonic() + options.session_ttl_s + IDLE_TIMEOUT_S
    while True:
        now = await observe(server)
        if not now.leftovers(before) or time.monotonic() > deadline:
            return now
        await asyncio.sleep(POLL_S)


def print_report(report: Report) -> None:
    """What was done, what was seen, and what failed."""
    tally = report.tally
    codes = {code: {"times": count} for code, count in sorted(tally.refused.items())}
    statuses = {f"HTTP {code}": {"times": n} for code, n in sorted(tally.statuses.items())}
    show_figures("visits", {name: {"times": n} for name, n in sorted(tally.done.items())})
    show_figures("answers", {**codes, **statuses, "tokens": {"times": tally.num_tokens}})
    moments = {name: asdict(getattr(report, name)) for name in ("before", "warm", "after")}
    show_figures("the server", moments)
    for failure in report.failures:
        print(f"FAILED: {failure}")
    print("passed" if not report.failures else f"{len(report.failures)} criteria failed")


def arguments() -> Options:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--model", help="checkpoint folder; default: the bundled model")
    add("--threads", type=int, help="threads of the server")
    add("--seconds", type=float, default=Options.seconds)
    add("--warm-up", dest="warm_up_s", type=float, help="default: a tenth of --seconds")
    add("--streams", type=int, default=Options.streams)
    add("--max-sessions", type=int, default=Options.max_sessions)
    add("--session-ttl", dest="session_ttl_s", type=float, default=Options.session_ttl_s)
    add("--seed", type=int, default=Options.seed)
    given = vars(parser.parse_args())
    if given["warm_up_s"] is None:
        given["warm_up_s"] = given["seconds"] / 10
    return Options(**given)


def main() -> int:
    """Soaks, prints, ends with the line of JSON; 1 where a criterion failed."""
    exit_on_sigterm()
    options = arguments()
    result = Result("soak", options.output)
    report = soak(options)
    print_report(report)
    tally = report.tally
    figures = {
        "options": {k: v for k, v in asdict(options).items() if k != "output"},
        "passed": not report.failures,
        "failures": len(report.failures),
        "visits": dict(tally.done),
        "refused": dict(tally.refused),
        "statuses": {str(status): count for status, count in tally.statuses.items()},
        "tokens": tally.num_tokens,
        "before": asdict(report.before),
        "warm": asdict(report.warm),
        "after": asdict(report.after),
        "rss_growth_mib": round(
            (report.after.resident_bytes - report.warm.resident_bytes) / MIB, 2
        ),
    }
    result.finish(figures)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
