"""What the speed of this project was to be, and what it is: a table of docs/speed.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.decode.peers import OURS
from benchmarks.decode.report import where
from benchmarks.report import Figures, markdown
from benchmarks.speed_report.results import PEERS, best

#: A long context may cost so much more than a short one.
FLAT_WITHIN = 0.02


@dataclass(frozen=True)
class Target:
    """``reached`` is what part of it was: 1 is all."""

    of: str
    wanted: str
    found: str
    reached: float

    @property
    def verdict(self) -> str:
        return "reached" if self.reached >= 1 else f"**missed**: {int(100 * self.reached)}% of it"


def targets_table(results: dict[str, Figures]) -> str:
    """Every target, what was found, and whether that is enough."""
    targets = [*decode_targets(results["decode"]["rows"]), *server_targets(results)]
    body = [[one.of, one.wanted, one.found, one.verdict] for one in targets]
    return markdown(["what", "target", "measured", "so"], body)


def decode_targets(rows: Sequence[Figures]) -> Iterator[Target]:
    """Those of `decode`."""
    one = where(rows, size="S1", mode="decode", dtype="bfloat16", threads=1, streams=1)
    of = "S1, 1 stream, bf16, 1 thread: ratio to llama.cpp's"
    for peer, context, least in (("rwkv7", 0, 2.0), ("llama", 0, 1.5), ("llama", 8192, 20.0)):
        (row,) = where(one, context=context)
        name = {"rwkv7": "RWKV-7", "llama": "Llama"}[peer]
        yield _ratio(f"{of} {name} at {context:,} tokens", row["ratios"][peer], least)
    many = where(rows, size="S1", mode="decode", streams=64)
    of = "S1, 64 streams, up to 2 threads, best weights: ratio to"
    yield _best_ratio(f"{of} the best peer at 0 tokens", where(many, context=0), 2.0)
    far = where(many, context=2048)
    yield _best_ratio(f"{of} llama.cpp's Llama at 2,048", far, 10.0, ("llama",))
    ours = best(where(many, context=0), OURS, 2)
    assert ours is not None
    yield _fraction(
        "S1, 64 streams, up to 2 threads: of the roofline", [ours.figures["fraction"]], 0.75
    )
    for dtype in ("bfloat16", "int8"):
        wide = where(rows, size="S2", mode="decode", dtype=dtype, streams=1, context=0)
        fractions = [row["contenders"][OURS[0]]["fraction"] for row in wide]
        yield _fraction(f"S2, 1 stream, {dtype}, 1 and 2 threads: of the roofline", fractions, 0.9)
    wide = where(rows, size="S2", mode="decode", dtype="bfloat16", streams=64, context=0)
    yield _best_ratio(
        "S2, 64 streams, bf16, up to 2 threads: ratio to the best peer at 0 tokens", wide, 1.5
    )
    for size in ("S1", "S2"):
        prompts = where(rows, size=size, mode="prefill")
        for threads in (1, 2):
            of = f"prefill of 512, {size}, up to {threads} thread{'s' if threads > 1 else ''}"
            yield _best_ratio(f"{of}: ratio to the best peer", prompts, 1.0, threads=threads)


def server_targets(results: dict[str, Figures]) -> Iterator[Target]:
    """Those of the server and its sessions."""
    peers = {name: by["64"] for name, by in results["serve"]["ratios"].items()}
    least = min(ratio for name, ratio in peers.items() if not name.startswith("transformers"))
    yield _ratio("S1 over sockets, 64 streams: ratio to the best `llama-server`", least, 2.0)
    flat = results["flatness_native"]
    rows = next(iter(flat["models"].values()))
    of = f"time per token at {rows[-1]['position']:,} by that at {rows[0]['position']:,}"
    change = abs(flat["time_ratio"] - 1)
    found = f"{flat['time_ratio']:.4f}"
    yield Target(of, "within 2 %", found, min(1.0, FLAT_WITHIN / max(change, 1e-9)))
    growth = flat["rss_growth_kib"]
    yield Target("growth of the process meanwhile", "nil", f"{growth:,} KiB", float(growth <= 0))
    cost = max(case["us_per_token"] for case in results["server_cost"]["cases"])
    of = "server CPU per token outside the model, 64 streams, costliest way"
    yield Target(of, "25 us at most", f"{cost:.1f} us", 25 / cost)
    fork = results["capacity"]["fork"]["median_us"]
    yield Target("fork of a session, S1", "50 us at most", f"{fork:.1f} us", 50 / fork)


def _ratio(of: str, found: float, least: float) -> Target:
    return Target(of, f"{least:g}x", f"{found:.2f}x", found / least)


def _best_ratio(
    of: str,
    rows: Sequence[Figures],
    least: float,
    peers: Sequence[str] = PEERS,
    threads: int = 2,
) -> Target:
    ours, theirs = best(rows, OURS, threads), best(rows, peers, threads)
    assert ours is not None and theirs is not None, of
    return _ratio(of, ours.rate / theirs.rate, least)


def _fraction(of: str, found: Sequence[float], least: float) -> Target:
    text = ", ".join(f"{value:.0%}" for value in found)
    return Target(of, f"{least:.0%}", text, min(found) / least)
