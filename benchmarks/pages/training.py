"""The tables of training.md: what `benchmarks.training` and `benchmarks.round_trip` found."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

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
        "curves": curve_table(result["curves"]),
        "round trips": round_trip_table(),
    }


def round_trip_table() -> str:
    """Each model in each program, next to Everstream on torch."""
    body = []
    for name in ROUND_TRIPS:
        programs = read_result(RESULTS / f"{name}.json")["programs"]
        model = name.removeprefix("round_trip_") if name != "round_trip" else "rwkv7"
        body += [
            [
                model,
                f"{program} ({row['version']})" if "version" in row else program,
                f"{row['bits_per_byte']:.6f}",
                f"{row['difference']:.1e}",
                f"{row['same_greedy_tokens']:,} of {row['greedy_tokens']:,}",
            ]
            for program, row in programs.items()
        ]
    head = ["model", "program, file", "bits per byte", "difference", "equal greedy tokens"]
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


def curve_table(curves: Sequence[Figures]) -> str:
    """The loss at some steps, and the mean of the last quarter of them."""
    num_steps = len(curves[0]["fused"])
    steps = sorted({1, num_steps // 4, num_steps // 2, num_steps})
    body = []
    for curve in curves:
        for form in ("reference", "fused"):
            cells = [f"{curve[form][step - 1]:.4f}" for step in steps]
            name = {"reference": "definitions", "fused": "kernels"}[form]
            last = fmean(curve[form][-num_steps // 4 :])
            body.append([curve["precision"], name, *cells, f"{last:.4f}"])
    head = ["precision", "form", *(f"step {step}" for step in steps)]
    return markdown([*head, "mean of the last quarter"], body)
