"""The tables of comparison.md and comparison-tables.md, of `benchmarks.mechanisms`."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.mechanisms.gather import (
    Competitor,
    bucket_names,
    competitors,
    difference,
    leaderboard,
    recall_rows,
)
from benchmarks.mechanisms.quality import WINDOW
from benchmarks.mechanisms.specs import BASELINE
from benchmarks.pages import ablation
from benchmarks.report import RESULTS, markdown, read_result

Run = dict[str, Any]
RESULT = RESULTS / "mechanisms.json"
MISSING = "-"


def summary() -> dict[str, str]:
    """The table of docs/background/comparison.md."""
    return {"summary": summary_table(read_result(RESULT)["runs"], "small")}


def tables() -> dict[str, str]:
    """Those of docs/contribute/comparison-tables.md."""
    runs = read_result(RESULT)["runs"]
    return tables_of(runs) | commands(runs) | ablation.tables()


def tables_of(runs: list[Run]) -> dict[str, str]:
    """By size: quality, positions and, where it was measured, speed; then recall."""
    result = {}
    entries = competitors(runs)
    for size in dict.fromkeys(entry.size for entry in entries):
        of_size = leaderboard([entry for entry in entries if entry.size == size])
        result[f"quality, {size}"] = quality_table(of_size)
        result[f"positions, {size}"] = bucket_table(of_size)
        if any(entry.speed for entry in of_size):
            result[f"speed, {size}"] = speed_table(of_size)
    if any(run["kind"] == "recall" for run in runs):
        result["recall"] = recall_table(runs)
    return result


def summary_table(runs: list[Run], size: str) -> str:
    """One row for each mechanism of a size, the fewest bits per byte first."""
    entries = leaderboard([entry for entry in competitors(runs) if entry.size == size])
    (baseline,) = (entry for entry in entries if entry.name == BASELINE)
    recalled = {name.partition(":")[0]: values[-1] for name, _, values in recall_rows(runs)[0]}
    rows = []
    for entry in entries:
        gap = difference(entry, baseline)[0]
        assert entry.speed is not None, entry.name
        rate = entry.speed["tokens_per_s"]
        rows.append(
            [
                f"`{entry.name}`",
                f"{entry.bits_per_byte():.3f}",
                MISSING if entry is baseline else f"{gap:+.3f}",
                _state(entry) if entry.constant else "grows",
                f"{recalled[entry.name.partition(':')[0]]:.0%}",
                _decode(rate, 16),
                f"{rate['training']:,.0f}",
            ]
        )
    head = ["mechanism", "bits per byte", f"against {BASELINE}", "bytes per session", "recall"]
    return markdown([*head, "decoding", "training, tokens/s"], rows)


def commands(runs: list[Run]) -> dict[str, str]:
    """By table: the commands that make its rows, one for each recipe and seed."""
    found: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        table, command = _command(run)
        found.setdefault(table, {}).setdefault(command, []).append(run["mechanism"])
    return {
        f"commands, {table}": "```sh\n"
        + "\n".join(f"{command} {' '.join(names)}" for command, names in of_table.items())
        + "\n```"
        for table, of_table in found.items()
    }


def _command(run: Run) -> tuple[str, str]:
    """The table of a run, and its command without the mechanism."""
    recipe, kind = run["recipe"], run["kind"]
    start = "python -m benchmarks.mechanisms"
    if kind == "recall":
        steps, seed = recipe["num_steps"], run["seed"]
        return "recall", f"{start} recall --runs runs --steps {steps} --seeds {seed} --"
    texts = f"--runs runs --sizes {run['size']} --data children.txt --data fiction.txt"
    if kind == "speed":
        rounds = f"--rounds {recipe['rounds']} --dtype {recipe['dtype']}"
        return f"speed, {run['size']}", f"{start} speed {texts} {rounds} --"
    scored = "--valid valid.txt --out-of-domain wikitext2.txt"
    steps = f"--steps {recipe['num_steps']} --warmup-steps {recipe['warmup_steps']}"
    return run["size"], f"{start} train {texts} {scored} {steps} --seeds {run['seed']} --"


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
    return markdown(head, rows)


def bucket_table(entries: list[Competitor]) -> str:
    """Bits per byte by position: does a longer past help?"""
    names = bucket_names(entries)
    rows = [[f"`{entry.name}`", *(_bucket(entry, name) for name in names)] for entry in entries]
    return markdown(["tokens before", *names], rows)


def speed_table(entries: list[Competitor]) -> str:
    """Tokens/s; a cache is timed at two lengths."""
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
    return markdown(head, rows)


def recall_table(runs: list[Run]) -> str:
    """Share of right answers by the number of pairs, best first."""
    rows, pairs = recall_rows(runs)
    text = [
        [f"`{name}`", str(seeds), *(f"{v:.1%}" for v in values)] for name, seeds, values in rows
    ]
    return markdown(["mechanism", "seeds", *pairs], text)


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
