"""What `benchmarks.checkpoints` found: its figures, and the tables of docs/models.md.

``python -m benchmarks.checkpoints.report`` writes the tables into the page; a test compares them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from benchmarks.decode_peers import Point
from benchmarks.decode_report import Turns
from benchmarks.harness import ROOT, Figures
from benchmarks.mechanisms.report import markdown

RESULT = ROOT / "benchmarks" / "results" / "checkpoints.json"
OURS, PEERS = "everstream", ("llama.cpp", "rwkv")


def figures_of(point: Point, turns: Mapping[str, Turns], skipped: Mapping[str, str]) -> Figures:
    """A row: tokens/s of each, how they spread, and how many times as fast Everstream is."""
    contenders = {
        name: {
            "tokens_per_s": round(found.tokens_per_s, 2),
            "spread": round(found.spread, 4),
            "variant": found.opened.variant,
            "step_bytes": found.opened.cost.num_bytes,
            "gb_per_s": round(max(found.bandwidths) / 1e9, 2),
            "bound": found.limit.bound,
            "of_roofline": round(found.fraction, 4),
        }
        for name, found in turns.items()
    }
    ours = turns[OURS].tokens_per_s
    ratios = {
        name: round(ours / found.tokens_per_s, 3) for name, found in turns.items() if name != OURS
    }
    return {**asdict(point), "contenders": contenders, "ratios": ratios, "skipped": dict(skipped)}


def tables(rows: Sequence[Figures]) -> str:
    """A table for each size."""
    sizes = dict.fromkeys(row["size"] for row in rows)
    return "\n\n".join(
        f"**{size}**\n\n{table([row for row in rows if row['size'] == size])}" for size in sizes
    )


def table(rows: Sequence[Figures]) -> str:
    """Tokens/s by weights, threads and work."""
    body = []
    for row in rows:
        ours = row["contenders"][OURS]
        work = "prompt of 512" if row["mode"] == "prefill" else f"{row['streams']} streams"
        cells = [row["dtype"], str(row["threads"]), work, f"{ours['tokens_per_s']:,.1f}"]
        cells.append(f"{ours['of_roofline']:.0%} ({ours['bound']})")
        for name in PEERS:
            other = row["contenders"].get(name)
            cells.append(f"{other['tokens_per_s']:,.1f}" if other else "")
            cells.append(f"{row['ratios'][name]:.2f}" if other else "")
        body.append(cells)
    head = ["weights", "threads", "work", "Everstream, tokens/s", "of the limit"]
    for name in PEERS:
        head += [name, "ratio"]
    return markdown(head, body)


def read() -> Figures:
    """The committed result."""
    result: Figures = json.loads(RESULT.read_text(encoding="utf-8"))
    return result
