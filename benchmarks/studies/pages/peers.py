"""The tables of docs/background/peers.md from what `benchmarks.peers` found."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.decode.report import MISSING, SHORT, points_of, where
from benchmarks.peers.__main__ import MODELS, OURS, RESULT, WITH_AMX
from benchmarks.report import Figures, bullets, markdown, read_result


def tables() -> dict[str, str]:
    """A table for each model on each processor, and why cells are empty."""
    found = {}
    for ending, result in (("", RESULT), (" amx", WITH_AMX)):
        rows = read_result(result)["rows"]
        for name in ("qwen35", "rwkv7"):
            found[f"peers {name}{ending}"] = same_table(_of(rows, name))
        found[f"peers smollm2{ending}"] = chat_table(_of(rows, "smollm2"))
        found[f"peers left out{ending}"] = reasons(rows)
    return found


def chat_table(rows: Sequence[Figures]) -> str:
    """Ours in each type of weights, its original, and the peers; the best by the best."""
    dtypes = [dtype for (dtype,) in points_of(rows, "dtype")]
    others = [name for name in MODELS["smollm2"].contenders if name != OURS]
    body = []
    for context, streams, mode in points_of(rows, "context", "streams", "mode"):
        here = where(rows, context=context, streams=streams, mode=mode)
        ours = [_rate(row, OURS) for row in here]
        theirs = [max((_rate(row, name) for row in here), default=0.0) for name in others]
        cells = [_cell(rate) for rate in (*ours, *theirs)]
        body.append([f"{context:,}", _work(mode, streams), *cells, _factor(max(ours), theirs[1:])])
    head = ["tokens before", "", *(f"ours, {SHORT[dtype]}" for dtype in dtypes)]
    names = ["its original, ours", *others[1:]]
    return markdown([*head, *names, "ours / best peer"], body)


def same_table(rows: Sequence[Figures]) -> str:
    """Everybody on the same weights."""
    size = rows[0]["size"]
    (model,) = (model for model in MODELS.values() if model.size == size)
    names = list(model.contenders)
    body = []
    for row in rows:
        rates = [_rate(row, name) for name in names]
        cells = [_cell(rate) for rate in rates]
        work = _work(row["mode"], row["streams"])
        body.append([SHORT[row["dtype"]], work, *cells, _factor(rates[0], rates[1:])])
    return markdown(["weights", "", "ours", *names[1:], "ours / best peer"], body)


def comparison_cells() -> list[str]:
    """For the README: tokens/s of one stream of RWKV-7 0.4B, ours and llama.cpp's."""
    rows = where(_of(read_result(RESULT)["rows"], "rwkv7"), context=0, streams=1, mode="decode")
    return [
        ", ".join(f"{row['dtype']}: {_rate(row, name):,.0f}" for row in rows)
        for name in (OURS, "llama.cpp")
    ]


def reasons(rows: Sequence[Figures]) -> str:
    """Why a contender is missing at a point, in its own words."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for name, reason in row["skipped"].items():
            where_ = f"{row['size']} {_work(row['mode'], row['streams'])} at {row['context']:,}"
            found.setdefault(f"{name}: {_plain(reason)}", []).append(where_)
    return bullets(f"- {reason} ({places[0]}{_more(places)})" for reason, places in found.items())


def _of(rows: Sequence[Figures], name: str) -> list[Figures]:
    return where(rows, size=MODELS[name].size)


def _rate(row: Figures, name: str) -> float:
    of = row["contenders"].get(name)
    return float(of["tokens_per_s"]) if of else 0.0


def _cell(rate: float) -> str:
    return f"{rate:,.0f}" if rate else MISSING


def _work(mode: str, streams: int) -> str:
    if mode == "prefill":
        return "prompt of 512"
    return f"{streams} stream{'s' if streams > 1 else ''}"


def _factor(ours: float, peers: Sequence[float]) -> str:
    best = max(peers)
    return f"**{ours / best:.2f}**" if best else MISSING


def _plain(reason: str) -> str:
    """Without files, and the last words of a debugger and a C++ runtime at the end of a process."""
    if reason.startswith(("[Inferior", "terminate called")):
        return "it died"
    if "logits of one token differ" in reason:
        return "the same sequences get other logits in a batch"
    return reason.removesuffix(".gguf").rpartition(" ")[0] if reason.endswith(".gguf") else reason


def _more(places: Sequence[str]) -> str:
    return f" and {len(places) - 1} more" if len(places) > 1 else ""
