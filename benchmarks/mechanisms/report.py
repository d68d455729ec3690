"""``report``: all runs in one JSON file, the tables of the docs as markdown, and two plots."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.mechanisms.folder import Folder, read_results
from benchmarks.mechanisms.gather import (
    Competitor,
    bucket_names,
    competitors,
    difference,
    leaderboard,
    recall_rows,
)
from benchmarks.mechanisms.plots import plot
from benchmarks.mechanisms.quality import WINDOW
from benchmarks.mechanisms.specs import BASELINE
from benchmarks.report import markdown

Run = dict[str, Any]
MISSING = "-"
QUALITY_NOTE = (
    f"Bits per byte in windows of {WINDOW} tokens, each from an empty state; ± is half of what lies"
    f" between seeds. Against {BASELINE}: the difference, ± its standard error over windows of the"
    " text. Long past: the state is carried through the whole document; with a *, windows that"
    " overlap by half."
)
BUCKET_NOTE = (
    "Bits per byte of the validation text by the number of tokens that can be looked back on;"
    " in brackets, where there are more than a window has, the change that they bring: the same"
    " tokens with a past cut at their window are the comparison."
)

CACHE_NOTE = (
    f"The step of `{BASELINE}` copies its whole cache at each token, so its decoding figures are"
    " those of a plain cache that is concatenated, not of a tuned one."
)


def write(folder: Folder, json_path: Path | None, table: Path | None, plots: Path | None) -> None:
    """Prints the tables and writes what has a path."""
    runs = read_results(folder.path)
    text = tables(runs, [file.stem for file in sorted(folder.path.glob("*.failed"))])
    print(text)
    if json_path:
        merged = json.dumps({"runs": runs}, separators=(",", ":"))
        json_path.write_text(merged + "\n", encoding="utf-8")
    if table:
        table.write_text(text + "\n", encoding="utf-8")
    if plots:
        plot(competitors(runs), plots)


def tables(runs: list[Run], failed: Sequence[str] = ()) -> str:
    """Everything as markdown, in the order of the docs."""
    parts = []
    entries = competitors(runs)
    for size in dict.fromkeys(entry.size for entry in entries):
        of_size = leaderboard([entry for entry in entries if entry.size == size])
        parts += [title(of_size), quality_table(of_size), bucket_table(of_size)]
        if any(entry.speed for entry in of_size):
            parts.append(speed_table(of_size))
    for form in dict.fromkeys(run["recipe"]["form"] for run in runs if run["kind"] == "recall"):
        parts.append(recall_table(runs, form))
    if failed:
        parts.append("Runs without a result: " + ", ".join(failed) + ".")
    return "\n\n".join(part for part in parts if part)


def title(entries: list[Competitor]) -> str:
    """What the tables of a size have in common."""
    first = entries[0].runs[0]
    recipe = first["recipe"]
    sizes = [run["num_parameters"] for entry in entries for run in entry.runs]
    rate = {run["recipe"]["learning_rate"] for entry in entries for run in entry.runs}
    valid, other = (first["quality"][name] for name in ("valid", "out_of_domain"))
    return (
        f"### {entries[0].size}: {min(sizes):,} to {max(sizes):,} parameters\n\n"
        f"{first['training']['num_tokens']:,} tokens in {recipe['num_steps']} steps,"
        f" {recipe['optimizer']}, peak learning rate {' or '.join(f'{r:g}' for r in sorted(rate))}."
        f" Scored: {valid['num_bytes']:,} bytes of {valid['file']},"
        f" {other['num_bytes']:,} of {other['file']}."
        f" {_machine(first)}."
    )


def quality_table(entries: list[Competitor]) -> str:
    """Bits per byte, best first."""
    baseline = next((e for e in entries if e.name == BASELINE), None)
    rows = []
    for entry in entries:
        gap = difference(entry, baseline) if baseline and entry is not baseline else None
        rows.append(
            [
                f"`{entry.name}`",
                str(len(entry.runs)),
                _bits(entry, "valid", "windows"),
                f"{gap[0]:+.4f} ± {gap[1]:.4f}" if gap else MISSING,
                _bits(entry, "valid", "long"),
                _bits(entry, "out_of_domain", "windows"),
                _bits(entry, "out_of_domain", "long"),
                _state(entry),
            ]
        )
    head = ["mechanism", "seeds", "bits per byte", f"against {BASELINE}", "long past"]
    head += ["out of domain", "out of domain, long past", "bytes per session"]
    return f"{markdown(head, rows)}\n\n{QUALITY_NOTE}"


def bucket_table(entries: list[Competitor]) -> str:
    """Bits per byte by position: does a longer past help?"""
    names = bucket_names(entries)
    rows = [[f"`{entry.name}`", *(_bucket(entry, name) for name in names)] for entry in entries]
    return f"{BUCKET_NOTE}\n\n{markdown(['tokens before', *names], rows)}"


def speed_table(entries: list[Competitor]) -> str:
    """Tokens/s and where they were measured; a cache is timed at two lengths."""
    rows = []
    for entry in entries:
        rate = entry.speed.get("tokens_per_s") if entry.speed else None
        if rate is None:
            continue
        rows.append(
            [
                f"`{entry.name}`",
                f"{rate['training']:,.0f}",
                _decode(rate, 1),
                _decode(rate, 16),
                _state(entry),
            ]
        )
    head = ["mechanism", "training", "decoding, 1 session", "16 sessions", "bytes per session"]
    speeds = [entry.speed for entry in entries if entry.speed]
    places = [f"{_machine(run)}, decoding in {run['recipe']['dtype']}" for run in speeds]
    note = f"Measured on {'; '.join(dict.fromkeys(places))}."
    if not all(entry.constant for entry in entries if entry.speed):
        note += f" {CACHE_NOTE}"
    return f"Tokens/s.\n\n{markdown(head, rows)}\n\n{note}"


def recall_table(runs: list[Run], form: str) -> str:
    """Share of right answers by the number of pairs, best first."""
    rows, pairs = recall_rows(runs, form)
    recipe = next(r for r in runs if r["kind"] == "recall" and r["recipe"]["form"] == form)
    steps = recipe["recipe"]["num_steps"]
    text = [
        [f"`{name}`", str(seeds), *(f"{v:.1%}" for v in values)] for name, seeds, values in rows
    ]
    title = f"### associative recall, pairs {form}: right answers after {steps} steps, by pairs"
    return f"{title}\n\n" + markdown(["mechanism", "seeds", *pairs], text)


def _machine(run: Run) -> str:
    machine = run["machine"]
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return f"{machine['cpu']}, {threads}, torch {machine['torch']}"


def _bits(entry: Competitor, text: str, way: str) -> str:
    """The mean over seeds, and half of what lies between them."""
    values = [run["quality"][text]["bits_per_byte"][way] for run in entry.runs]
    spread = f" ± {(max(values) - min(values)) / 2:.4f}" if len(values) > 1 else ""
    note = "*" if entry.runs[0]["quality"][text]["long_is"] == "sliding" and way == "long" else ""
    return f"{statistics.fmean(values):.4f}{note}{spread}"


def _bucket(entry: Competitor, name: str) -> str:
    found = [run["quality"]["valid"]["buckets"].get(name) for run in entry.runs]
    if None in found:
        return MISSING
    mean = statistics.fmean(bucket["bits_per_byte"] for bucket in found)
    if "same_in_windows" not in found[0]:
        return f"{mean:.4f}"
    change = mean - statistics.fmean(bucket["same_in_windows"] for bucket in found)
    return f"{mean:.4f} ({change:+.4f})"


def _state(entry: Competitor) -> str:
    run = entry.runs[0]
    if "state_bytes" in run:
        return f"{run['state_bytes']:,}"
    return f"{run['cache_bytes_per_token']:,} per token ({entry.session_bytes:,} at {WINDOW})"


def _decode(rates: dict[str, float], sessions: int) -> str:
    """One figure, or one for each length of the cache."""
    found = {
        name: rate for name, rate in rates.items() if f"{name}_".startswith(f"decode_{sessions}_")
    }
    if len(found) == 1:
        return f"{next(iter(found.values())):,.0f}"
    return ", ".join(f"{rate:,.0f} at {name.rpartition('_')[2]}" for name, rate in found.items())
