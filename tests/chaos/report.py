"""A run's report: for people as Markdown, for programs as JSON."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.chaos.run import Verdict
from tests.chaos.waits import percentile

MAX_SHOWN = 40


def as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "seed": verdict.plan.seed,
        "verdict": "kept" if verdict.is_good else "violated",
        "network": verdict.network,
        "clients": verdict.plan.num_clients,
        "counts": dict(verdict.counts),
        "faults": [
            {
                "at_s": round(at_s, 3),
                "kind": fault.kind,
                "lasts_s": round(fault.lasts_s, 3),
                "replica": fault.replica + 1,
            }
            for at_s, fault in verdict.faults
        ],
        "take_over_s": {
            kind: {
                "readers": len(values),
                "p50": round(percentile(values, 50), 3),
                "p99": round(percentile(values, 99), 3),
                "max": round(max(values), 3),
            }
            for kind, values in sorted(verdict.waits.seconds.items())
        },
        "unbroken": dict(verdict.waits.num_unbroken),
        "ends_of_replicas": dict(_ends(verdict)),
        "refusals": dict(sorted(verdict.codes.items())),
        "ends_of_connections": dict(sorted(verdict.outcomes.items())),
        "problems": [str(problem) for problem in verdict.problems],
        "odd_ends": verdict.odd_ends,
        "stuck": verdict.stuck,
    }


def as_markdown(verdict: Verdict) -> str:
    content = as_json(verdict)
    lines = [
        f"# Chaos, seed {content['seed']}: {content['verdict']}",
        "",
        f"Three replicas, {content['clients']} clients, wires of {content['network']}.",
        "",
        "| what | how many |",
        "|---|---|",
        *(f"| {name} | {number:,} |" for name, number in content["counts"].items()),
        "",
        "Seconds without a new event, by what happened to the reader's replica:",
        "",
        "| fault | readers | p50 | p99 | max | went on unbroken |",
        "|---|---|---|---|---|---|",
        *_wait_rows(content),
        "",
        *_listed("Faults", [f"{at_s:.2f} s: {fault}" for at_s, fault in verdict.faults]),
        *_listed("Ends of replicas", _counted(content["ends_of_replicas"])),
        *_listed("Refusals", _counted(content["refusals"])),
        *_listed("Ends of connections", _counted(content["ends_of_connections"])),
        *_listed("Broken promises", content["problems"]),
        *_listed("Ends and errors that no fault explains", content["odd_ends"]),
        *_listed("Sessions that did not come to their end", content["stuck"]),
    ]
    return "\n".join(lines)


def write_report(verdict: Verdict, path: Path) -> None:
    """As JSON where the file is called so, else as Markdown."""
    if path.suffix == ".json":
        path.write_text(json.dumps(as_json(verdict), indent=2) + "\n")
    else:
        path.write_text(as_markdown(verdict))


def _wait_rows(content: dict[str, Any]) -> list[str]:
    waits, unbroken = content["take_over_s"], content["unbroken"]
    rows = []
    for kind in sorted({*waits, *unbroken}):
        found = waits.get(kind, {"readers": 0})
        numbers = [f"{found[name]:.2f}" if name in found else "" for name in ("p50", "p99", "max")]
        cells = [kind, str(found["readers"]), *numbers, str(unbroken.get(kind, 0))]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _listed(title: str, lines: list[str]) -> list[str]:
    if not lines:
        return [f"## {title}", "", "None.", ""]
    more = [f"- and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
    return [f"## {title}", "", *(f"- {line}" for line in lines[:MAX_SHOWN]), *more, ""]


def _counted(counts: dict[str, int]) -> list[str]:
    return [f"{name}: {number}" for name, number in counts.items()]


def _ends(verdict: Verdict) -> Counter[str]:
    return Counter(
        f"{'by a fault or drain' if one.meant else 'by itself'}, code {one.code}"
        for one in verdict.exits
    )
