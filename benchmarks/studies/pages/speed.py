"""The tables and the plot of docs/background/speed.md, and tables of measurements.md.

"Up to two threads" is the better one of a run on one thread and a run on two, for us as for peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.decode.peers import LOWER_LEVEL, NARROW, NATIVE_PEERS, OURS, TITLES
from benchmarks.decode.report import MISSING, SHORT, points_of, where
from benchmarks.process import ROOT
from benchmarks.report import RESULTS, Figures, markdown, read_result
from benchmarks.studies.pages.prompts import prompts_summary

PLOT = ROOT / "docs/images/speed.png"
#: "PyTorch, eager" and "PyTorch, compiled" run our own model and are not peers.
PEERS = (*NATIVE_PEERS, "generate")

#: Of the table of rooflines.
ROOFLINE_STREAMS = (1, 64)

SERVER = "everstream"
SERVERS = {
    "llama": "`llama-server`, Llama",
    "rwkv7": "`llama-server`, RWKV-7",
}


@dataclass(frozen=True)
class Best:
    """The fastest of some contenders at a point, and on which threads and type of weights."""

    name: str
    row: Figures

    @property
    def figures(self) -> Figures:
        found: Figures = self.row["contenders"][self.name]
        return found

    @property
    def rate(self) -> float:
        return float(self.figures["tokens_per_s"])


def read(name: str) -> Figures:
    """A committed result."""
    return read_result(RESULTS / f"{name}.json")


def best(rows: Iterable[Figures], names: Sequence[str], threads: int) -> Best | None:
    """The fastest of the contenders called ``names``, on up to so many threads."""
    found = [
        Best(name, row)
        for row in rows
        for name in names
        if name in row["contenders"] and row["threads"] <= threads
    ]
    return max(found, key=lambda one: one.rate, default=None)


def best_table(rows: Sequence[Figures], mode: str, threads: int) -> str:
    """Our best type of weights and the best of each peer, at an empty context."""
    empty, body = where(rows, mode=mode, context=0), []
    for size, streams in points_of(empty, "size", "streams"):
        here = where(empty, size=size, streams=streams)
        ours, peers = best(here, OURS, threads), best(here, PEERS, threads)
        assert ours is not None and peers is not None, (size, threads, streams)
        cells = [_best_cell(best(here, (name,), threads), threads) for name in PEERS]
        ratio = f"**{ours.rate / peers.rate:.2f}**"
        body.append([size, str(streams), _best_cell(ours, threads), *cells, ratio])
    head = ["size", "streams", "ours", *(TITLES[name] for name in PEERS)]
    return markdown([*head, "ours / best peer"], body)


def amx_table(rows: Sequence[Figures]) -> str:
    """`gated` with AMX, and without."""
    head = ["with AMX", "without", "with / without"]
    return pair_table(rows, (OURS[0], LOWER_LEVEL), head)


def narrow_table(rows: Sequence[Figures]) -> str:
    """`gated` with sums in bfloat16, and in float32."""
    head = ["sums in bfloat16", "in float32", "bfloat16 / float32"]
    return pair_table(rows, (NARROW, OURS[0]), head)


def pair_table(rows: Sequence[Figures], names: tuple[str, str], head: Sequence[str]) -> str:
    """Two contenders, and the first by the second."""
    body = []
    for row in rows:
        what = "prompt of 512" if row["mode"] == "prefill" else f"streams: {row['streams']}"
        found = [row["contenders"][name] for name in names]
        cells = [f"{of['tokens_per_s']:,.0f} ± {of['spread'] / 2:.0%}" for of in found]
        ratio = f"**{found[0]['tokens_per_s'] / found[1]['tokens_per_s']:.2f}**"
        body.append([row["size"], SHORT[row["dtype"]], what, *cells, ratio])
    return markdown(["size", "weights", "", *head], body)


def roofline_table(rows: Sequence[Figures]) -> str:
    """What a step of `gated` took, by what it must take: the longer part of it, and their sum."""
    found: dict[tuple[str, ...], list[str]] = {}
    for row in where(rows, mode="decode", context=0):
        if row["streams"] not in ROOFLINE_STREAMS:
            continue
        figures = row["contenders"][OURS[0]]
        step = Step.of(figures)
        key = row["size"], str(row["threads"]), SHORT[row["dtype"]]
        cells = [f"{step.taken_ms:,.2f}", f"{figures['fraction']:.0%}, {figures['bound']}"]
        found.setdefault(key, []).extend([*cells, f"{step.of_sum:.0%}"])
    head = ["size", "threads", "weights"]
    for streams in ROOFLINE_STREAMS:
        head += [f"streams: {streams}, ms", "of the roofline", "of the sum"]
    return markdown(head, ([*key, *cells] for key, cells in found.items()))


@dataclass(frozen=True)
class Step:
    """Milliseconds of a step: those of its bytes, of its operations, and those that it took."""

    moving_ms: float
    computing_ms: float
    taken_ms: float

    @classmethod
    def of(cls, figures: Figures) -> Step:
        return cls(
            1e3 * figures["step_bytes"] / figures["bytes_per_s"],
            1e3 * figures["step_operations"] / figures["operations_per_s"],
            1e3 * figures["step_tokens"] / figures["tokens_per_s"],
        )

    @property
    def of_sum(self) -> float:
        """How near the step is to one that moves first and computes then."""
        return (self.moving_ms + self.computing_ms) / self.taken_ms


def serve_table(serve: Figures) -> str:
    """Servers over real sockets."""
    body = []
    for streams in next(iter(serve["servers"].values())):
        for name, of_one in serve["servers"].items():
            figures = of_one[streams]
            ratio = serve["ratios"].get(name, {}).get(streams)
            against = f"{ratio:.2f}" if ratio else ""
            body.append([name, str(streams), *_serve_cells(figures), against])
    head = ["server, threads", "streams", "tokens/s", "TTFT p50 / p99, ms"]
    head += ["ITL p50 / p99, ms", "server CPU, us/token", "ours / peer"]
    return markdown(head, body)


def serve_summary(serve: Figures) -> str:
    """Our server at each number of streams, and the better one of each peer's runs."""
    body = []
    for streams, ours in serve["servers"][SERVER].items():
        peers = [
            max(
                of_one[streams]["tokens_per_s"]
                for name, of_one in serve["servers"].items()
                if name.partition(",")[0] == peer
            )
            for peer in SERVERS
        ]
        cells = [f"{rate:,.0f} ({ours['tokens_per_s'] / rate:.2f}x)" for rate in peers]
        body.append([streams, *_serve_cells(ours)[:3], *cells])
    head = ["streams", "ours, tokens/s", "TTFT p50 / p99, ms", "ITL p50 / p99, ms"]
    return markdown([*head, *SERVERS.values()], body)


def _serve_cells(figures: Figures) -> list[str]:
    pairs = [
        " / ".join(_optional(figures[f"{name}_{part}_ms"]) for part in ("p50", "p99"))
        for name in ("ttft", "itl")
    ]
    return [f"{figures['tokens_per_s']:,.0f}", *pairs, f"{figures['cpu_us_per_token']:,.0f}"]


def server_cost_table(cost: Figures) -> str:
    """CPU time of the server around a model that costs nothing."""
    head = ["transport", "rate of each stream", "us/token", "event loop", "engine", "tokens/s"]
    names = ("us_per_token", "loop_us_per_token", "engine_us_per_token")
    body = [
        [
            case["way"],
            f"{case['pace']:g} tokens/s" if case["pace"] else "no limit",
            *(f"{case[name]:.1f}" for name in names),
            f"{case['tokens_per_s']:,.0f}",
        ]
        for case in cost["cases"]
    ]
    return markdown(head, body)


def first_token_table(cost: Figures) -> str:
    """The time to the first token of a short prompt, without the model."""
    body = [
        [way, f"{found['p50_ms']:.2f}", f"{found['p99_ms']:.2f}"]
        for way, found in cost["first_token"].items()
    ]
    return markdown(["transport", "first token p50, ms", "p99, ms"], body)


def capacity_table(capacity: Figures) -> str:
    """Bytes of sessions, and of a KV cache; microseconds of a copy."""
    sessions, fork = capacity["sessions"], capacity["fork"]
    body = [
        [
            "state of a session, any length",
            f"{sessions['state_bytes']:,}",
            f"{fork['median_us']:,.1f}",
        ],
        ["idle session, measured", f"{sessions['idle_bytes_per_session']:,}", ""],
        ["additional while it generates", f"{sessions['extra_bytes_per_active_session']:,}", ""],
    ]
    for cache in capacity["kv_cache"]:
        name = f"KV cache of {cache['tokens']:,} tokens, calculated"
        body.append([name, f"{cache['bytes']:,}", f"{cache['copy_us']:,.0f}"])
    return markdown(["", "bytes", "copy (fork), us"], body)


def flatness_table(flatness: Figures) -> str:
    """Milliseconds per token and bytes of a session by position."""
    body = [
        [
            name,
            f"{row['position']:,}",
            f"{row['ms_per_token']:.3f}",
            f"{row['ratio']:.3f}",
            f"{row['memory_bytes'] / 2**20:,.1f}",
        ]
        for name, rows in flatness["models"].items()
        for row in rows
    ]
    return markdown(["model", "position", "ms/token", "ratio", "state or cache, MiB"], body)


def flat_table(flatness: Figures) -> str:
    """Of `gated` alone: milliseconds per token by position."""
    rows = flatness["models"]["gated"]
    body = [[f"{row['position']:,}", f"{row['ms_per_token']:.3f}"] for row in rows]
    return markdown(["position", "ms/token"], body)


def tables() -> dict[str, str]:
    """Those of docs/background/speed.md."""
    rows = read("decode")["rows"]
    return {
        "decoding": best_table(rows, "decode", 2),
        "prefill": best_table(rows, "prefill", 2),
        "amx": amx_table(read("amx")["rows"]),
        "narrow speed": narrow_table(read("narrow_sums")["rows"]),
        "serve": serve_summary(read("serve")),
        "prompts": prompts_summary(read("sessions_prompts")),
        "capacity": capacity_table(read("capacity")),
        "flatness": flat_table(read("flatness_native")),
    }


def full_tables() -> dict[str, str]:
    """Those of docs/contribute/measurements.md."""
    rows = read("decode")["rows"]
    return {
        "roofline": roofline_table(rows),
        "server_cost": server_cost_table(read("server_cost")),
        "first_token": first_token_table(read("server_cost")),
    }


def plot(file: Path = PLOT) -> None:
    """Tokens/s by context, for one stream and for 64: S1, bfloat16, one thread."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels: Any = figure.subplots(1, 2)
    rows = read("decode")["rows"]
    of_size = where(rows, size="S1", threads=1, mode="decode", dtype="bfloat16")
    for axes, streams in zip(panels, (1, 64), strict=True):
        here = where(of_size, streams=streams)
        contexts = [row["context"] for row in here]
        axes.set(title=f"{streams} stream{'s' if streams > 1 else ''}", yscale="log")
        axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
        for name in (OURS[0], *PEERS):
            points = [
                (i, row["contenders"][name])
                for i, row in enumerate(here)
                if name in row["contenders"]
            ]
            heights = [figures["tokens_per_s"] for _, figures in points]
            axes.plot([i for i, _ in points], heights, "o-", label=TITLES[name])
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("tokens/s, all streams")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.supxlabel("tokens of context", fontsize=10)
    figure.savefig(file, dpi=110)


def _best_cell(found: Best | None, threads: int) -> str:
    if found is None:
        return MISSING
    of = (
        f"{found.name} {SHORT[found.row['dtype']]}"
        if found.name in OURS
        else SHORT[found.row["dtype"]]
    )
    return f"{found.rate:,.0f} ({of}{', 1 thread' if found.row['threads'] < threads else ''})"


def _optional(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.1f}"
