"""The tables of training.md: what `benchmarks.training` and `benchmarks.round_trip` found."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report import RESULTS, Figures, markdown, read_result
from benchmarks.training import PARTS, RESULT

#: The results of `benchmarks.round_trip`, whose names end in the model's.
ROUND_TRIPS = ("round_trip", "round_trip_mamba2", "round_trip_qwen35", "round_trip_gated_deltanet")

ALL_PARTS = (*(part for part, _ in PARTS), "optimizer", "autograd and rest")


def tables() -> dict[str, str]:
    """Those of docs/contribute/training.md."""
    result = read_result(RESULT)
    return {
        "conditions": conditions(result),
        "speed": speed_table(result["speed"], result["peak_gflops"]),
        "profile": profile_table(result["profile"]),
        "round trips": round_trip_table(),
    }


def round_trip_table() -> str:
    """Each model in all programs, with the largest difference to Everstream on torch."""
    body = []
    for name in ROUND_TRIPS:
        programs = read_result(RESULTS / f"{name}.json")["programs"]
        rows = programs.values()
        texts = {f"{row['bits_per_byte']:.6f}" for row in rows}
        same = min(row["same_greedy_tokens"] for row in rows)
        assert len(texts) == 1, texts
        body.append(
            [
                name.removeprefix("round_trip_") if name != "round_trip" else "rwkv7",
                "; ".join(
                    f"{program} ({row['version']})" if "version" in row else program
                    for program, row in programs.items()
                ),
                *texts,
                f"{max(abs(row['difference']) for row in rows):.1e}",
                f"{same:,} of {max(row['greedy_tokens'] for row in rows):,}",
            ]
        )
    head = ["model", "program, file", "bits per byte", "largest difference", "equal greedy tokens"]
    return markdown(head, body)


def speed_table(rows: Sequence[Figures], peaks: Figures) -> str:
    """Tokens per second in both forms, and the kernels' share of the peak."""
    body = []
    for row in rows:
        fused, reference = row["fused"], row["reference"]
        peak = peaks[row["precision"]][str(row["threads"])]["wall"]
        body.append(
            [
                row["attention"],
                row["precision"],
                str(row["threads"]),
                f"{reference['tokens_per_s']:,}",
                f"{fused['tokens_per_s']:,}",
                f"{fused['tokens_per_s'] / reference['tokens_per_s']:.2f}",
                f"{fused['gflops']:.0f}",
                f"{fused['gflops'] / peak:.0%}",
            ]
        )
    head = ["mechanism", "precision", "threads", "tokens/s, definitions", "kernels", "ratio"]
    return markdown([*head, "GFLOP/s, kernels", "of the peak"], body)


def conditions(result: Figures) -> str:
    """On what, how often, and next to how much other work."""
    on, rounds = result["machine"], result["rounds"]
    return (
        f"{on['cpu']}, {on['cores']} cores, torch {on['torch']}; each figure is the median of"
        f" {rounds} steps after one\nthat warms up. The load was {on['load_at_start'][0]} when it"
        " began."
    )


def profile_table(profiles: Sequence[Figures]) -> str:
    """Shares of a step by part."""
    by_form = {profile["form"]: profile["milliseconds"] for profile in profiles}
    # In the unit that both forms have in common: their products are the same.
    products = {form: parts["products"] for form, parts in by_form.items()}
    body = []
    for part in ALL_PARTS:
        cells = [by_form[form].get(part, 0.0) / products[form] for form in ("reference", "fused")]
        body.append([part, *(f"{cell:.2f}" for cell in cells)])
    total = [sum(by_form[form].values()) / products[form] for form in ("reference", "fused")]
    body.append(["all", *(f"{cell:.2f}" for cell in total)])
    return markdown(["part", "definitions", "kernels"], body)
