"""The tables of models.md, of families' pages and of docs/contribute/measurements.md.

All are from what `benchmarks.checkpoints` found.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import published_files
from benchmarks.checkpoints import published
from benchmarks.report import RESULTS, Figures, markdown, read_result

RESULT = RESULTS / "checkpoints.json"
SIZES = RESULTS / "checkpoint_sizes.json"
SOCKETS = RESULTS / "checkpoint_sockets.json"
RESTORE = RESULTS / "checkpoint_restore.json"
EDITED = RESULTS / "checkpoint_edited.json"
CHAT_SESSIONS = RESULTS / "checkpoint_chat_sessions.json"
#: Measured by two commands, the larger models by the second one.
FAMILY_SIZES = (RESULTS / "family_sizes.json", RESULTS / "family_sizes_large.json")
#: What was asked after a text was read, by the names in `EDITED`.
EDITS = {
    "continued": "one more token",
    "edited": "the last 16 replaced",
    "restored_continued": "one more token, by another process",
    "restored_edited": "the last 16 replaced, by another process",
}
#: Of the files of a size, those whose loading is shown.
LOADED = (".pth", "Q8_0.gguf")
#: One result for each family.
CHOICES = ("checkpoints", "checkpoints_mamba2", "checkpoints_qwen35", "checkpoints_lfm2")
OURS, PEERS = "everstream", ("llama.cpp", "rwkv")
#: What tables call weights that have another name in the rows.
WEIGHTS = {"q4_0": "Q4_0", "q4_k_m": "Q4_K_M"}


def speed_tables(rows: Sequence[Figures]) -> str:
    """A table for each size."""
    sizes = dict.fromkeys(row["size"] for row in rows)
    return "\n\n".join(
        f"**{size}**\n\n{table([row for row in rows if row['size'] == size])}" for size in sizes
    )


def table(rows: Sequence[Figures]) -> str:
    """Tokens/s by weights, threads and work."""
    peers = [name for name in PEERS if any(name in row["contenders"] for row in rows)]
    body = []
    for row in rows:
        ours = row["contenders"][OURS]
        cells = [
            str(WEIGHTS.get(row["dtype"], row["dtype"])),
            str(row["threads"]),
            _work(row),
            f"{ours['tokens_per_s']:,.1f}",
        ]
        cells.append(f"{ours['fraction']:.0%} ({ours['bound']})")
        for name in peers:
            other = row["contenders"].get(name)
            cells.append(f"{other['tokens_per_s']:,.1f}" if other else _why_not(row, name))
            cells.append(f"{row['ratios'][name]:.2f}" if other else "")
        body.append(cells)
    head = ["weights", "threads", "work", "Everstream, tokens/s", "of the limit"]
    for name in peers:
        head += [name, "ratio"]
    return markdown(head, body)


def full_table(rows: Sequence[Figures]) -> str:
    """Ours on one thread by size and weights, a column for each kind of work.

    In parentheses ours by each peer, and the share of what the machine allows. Pages of families
    have two threads.
    """
    rows = [row for row in rows if row["threads"] == 1]
    works = list(dict.fromkeys(_work(row) for row in sorted(rows, key=_order)))
    sizes = [row["size"] for row in rows]
    found: dict[tuple[str, ...], dict[str, Figures]] = {}
    for row in rows:
        key = row["size"], row["dtype"]
        found.setdefault(key, {})[_work(row)] = row
    body = [
        [*key, *(_full_cell(of_model.get(work)) for work in works)]
        for key, of_model in sorted(found.items(), key=lambda item: sizes.index(item[0][0]))
    ]
    return markdown(["model", "weights", *works], body)


def _work(row: Figures) -> str:
    if row["mode"] == "prefill":
        return "prompt of 512"
    number = row["streams"]
    past = f" after {row['context']:,} tokens" if row.get("context") else ""
    return f"{number} stream{'s' if number > 1 else ''}{past}"


def _order(row: Figures) -> tuple[bool, int, int]:
    """Decoding first, then by the past."""
    return row["mode"] == "prefill", row.get("context", 0), row["streams"]


def _full_cell(row: Figures | None) -> str:
    if row is None:
        return ""
    ours, ratios = row["contenders"][OURS], row["ratios"]
    factors = [f"{ratios[PEERS[0]]:.2f}x"]
    factors += [f"{ratios[name]:.2f}x {name}" for name in PEERS[1:] if name in ratios]
    return f"{ours['tokens_per_s']:,.1f} ({', '.join(factors)}, {ours['fraction']:.0%})"


def _why_not(row: Figures, name: str) -> str:
    """Of llama.cpp, which runs every row but those that do not fit."""
    reason = row["skipped"].get(name)
    return f"not run: {reason}" if reason and name == PEERS[0] else ""


def summary_table(rows: Sequence[Figures]) -> str:
    """On two threads at an empty context: tokens/s by size and weights, and ours by llama.cpp's.

    Of weights of four bits also ours by ours in int8.
    """
    works = {
        "1": "1 stream",
        "8": "8 streams",
        "64": "64 streams",
        "prompt of 512": "prompt of 512",
    }
    found: dict[tuple[str, str], dict[str, Figures]] = {}
    for row in rows:
        if row["threads"] == 2 and not row.get("context"):
            work = "prompt of 512" if row["mode"] == "prefill" else str(row["streams"])
            found.setdefault((row["size"], row["dtype"]), {})[work] = row
    body = []
    for (size, dtype), of_model in found.items():
        int8 = found.get((size, "int8"), {}) if dtype in WEIGHTS else {}
        cells = [_summary_cell(of_model[work], int8.get(work)) for work in works]
        body.append([size, WEIGHTS.get(dtype, dtype), *cells])
    return markdown(["model", "weights", *works.values()], body)


def _summary_cell(row: Figures, int8: Figures | None) -> str:
    rate, factors = row["contenders"][OURS]["tokens_per_s"], f"{row['ratios'][PEERS[0]]:.2f}x"
    if int8:
        factors += f", {rate / int8['contenders'][OURS]['tokens_per_s']:.2f}x int8"
    return f"{rate:,.0f} ({factors})"


def loading_table(sizes: Sequence[Figures]) -> str:
    """How long a server takes to start, and its memory."""
    body = []
    for row in sizes:
        for found in (each for each in row["loading"] if each["file"].endswith(LOADED)):
            cells = [found["file"], f"{found['file_bytes'] / 1e6:,.0f} MB", found["dtype"]]
            cells += [f"{found['ready_s']:.1f} s", f"{found['steady_bytes'] / 1e6:,.0f} MB"]
            body.append([*cells, f"{found['peak_by_steady']:.2f}"])
    head = ["file", "size", "served in", "ready after", "memory while serving", "peak / serving"]
    return markdown(head, body)


def many_table(sizes: Sequence[Figures]) -> str:
    """Streams side by side, one long session, and a restart with stored ones."""
    body = []
    for row in sizes:
        streams = row["streams"]
        many = f"{streams['streams']} streams, all together"
        body.append([row["size"], many, f"{streams['tokens_per_s']:,.0f} tokens/s"])
        if long := row.get("long"):
            what = f"a token after {long['tokens']:,} tokens, and at the beginning"
            times = f"{long['token_ms_at_end']:.1f} ms, {long['token_ms_at_start']:.1f} ms"
            body.append([row["size"], what, times])
            grown = f"{long['grown_bytes'] / 2**20:.1f} MiB"
            body.append([row["size"], "memory that grew meanwhile", grown])
        if asleep := row.get("sleeping"):
            what = f"restart with {asleep['sessions']:,} stored sessions: ready after"
            body.append([row["size"], what, f"{asleep['ready_s']:.1f} s"])
            what = "first token of one of them"
            body.append([row["size"], what, f"{asleep['wake_ms']:.0f} ms"])
    return markdown(["model", "", "measured"], body)


def socket_table(files: Sequence[Figures]) -> str:
    """Tokens/s of both servers."""
    body = []
    for found in files:
        for streams, ours in found["servers"][OURS].items():
            cells = [found["file"], streams, f"{ours['tokens_per_s']:,.0f}"]
            for name in found["ratios"]:
                theirs = found["servers"][name][streams]["tokens_per_s"]
                cells += [f"{theirs:,.0f}", f"{found['ratios'][name][streams]:.2f}"]
            body.append(cells)
    head = ["file", "streams", "Everstream, tokens/s"]
    return markdown(
        [*head, *(cell for name in files[0]["ratios"] for cell in (name, "ratio"))], body
    )


def restore_table(lengths: Sequence[Figures]) -> str:
    """From the restored session to its first token."""
    body = []
    for row in lengths:
        ours, theirs = row["everstream"], row["llama-server"]
        cells = [f"{row['tokens']:,}", f"{ours['first_token_s'] * 1e3:,.0f} ms"]
        cells += [f"{theirs['first_token_s'] * 1e3:,.0f} ms", f"{theirs['tokens_read_again']:,}"]
        body.append(cells)
    head = ["tokens of the session", "Everstream", "llama-server", "tokens that it read again"]
    return markdown(head, body)


def conditions(result: Figures) -> str:
    """On what the speed was measured."""
    on = result["machine"]
    return (
        f"{on['cpu']}, {on['cores']} cores, {on['memory_gib']:.0f} GiB; load"
        f" {on['load_at_start'][0]} at the start; medians of {result['rounds']} turns of"
        f" {result['seconds']:g} s."
    )


def edited_table() -> str:
    """Seconds to a token after a long text was continued, or its end edited, on both servers."""
    body = []
    for row in read_result(EDITED)["lengths"][-1:]:
        sides = [row[name] for name in ("everstream", "in parts", "llama.cpp")]
        for name, what in {"read": "all of it", **EDITS}.items():
            times = [f"{side[f'{name}_s']:.2f} s" for side in sides]
            read = sides[-1].get(f"{name}_tokens", row["tokens"])
            body.append([f"{row['tokens']:,}", what, *times, f"{read:,}"])
    head = [
        "tokens",
        "",
        "Everstream",
        "in parts of 512",
        "llama.cpp's server",
        "tokens that it read",
    ]
    return markdown(head, body)


def family_size_table() -> str:
    """What models of the published shapes take in a server."""
    models = [model for result in FAMILY_SIZES for model in read_result(result)["models"]]
    body = []
    for model in models:
        loading, asleep = model["loading"], model["sleeping"]
        sessions = (
            f"{row['state_bytes'] / 1e6:,.1f} MB, {row['fork_and_token_ms']:.0f} ms,"
            f" {row['first_token_after_restart_ms']:.0f} ms"
            for row in model["sessions"]
        )
        body.append(
            [
                f"{model['model']}, {model['layers']} layers",
                f"{loading['ready_s']:.1f} s, {loading['steady_bytes'] / 1e6:,.0f} MB",
                *sessions,
                f"{model['streams']['tokens_per_s']:,.0f}",
                f"{asleep['ready_s']:.1f} s, {asleep['wake_ms']:.0f} ms",
            ]
        )
    lengths = (f"{row['tokens']:,} tokens" for row in models[0]["sessions"])
    head = ["model", "ready, memory", *lengths, "tokens/s of 64", "restart, first token"]
    return markdown(head, body)


def family_tables(family: str) -> dict[str, str]:
    """The speed of a family that `benchmarks.checkpoints --family` has measured."""
    speed = read_result(RESULTS / f"checkpoints_{family}.json")
    return {
        f"{family} conditions": conditions(speed),
        f"{family} speed": full_table(speed["rows"]),
    }


def family_summary(family: str) -> dict[str, str]:
    """The same in short, for the page of the family."""
    return {
        f"{family} speed": summary_table(
            read_result(RESULTS / f"checkpoints_{family}.json")["rows"]
        )
    }


def qwen35_tables() -> dict[str, str]:
    """Those of docs/models/qwen3.5.md."""
    return {**published.tables("qwen35"), **family_summary("qwen35")}


def mamba_tables() -> dict[str, str]:
    """Those of docs/models/mamba.md."""
    return {**published.tables("mamba2", "mamba"), **family_summary("mamba2")}


def mamba2_hybrid_tables() -> dict[str, str]:
    """Those of docs/models/mamba2-hybrids.md."""
    rows = read_result(RESULTS / "checkpoints_mamba2_hybrid.json")["rows"]
    one = {"mamba2_hybrid one thread": full_table(rows)}
    return family_summary("mamba2_hybrid") | one


def choice_table() -> str:
    """Tokens/s of each model in int8, of one stream and of 64."""
    body = []
    for family in CHOICES:
        found: dict[str, dict[int, float]] = {}
        for row in read_result(RESULTS / f"{family}.json")["rows"]:
            if (row["dtype"], row["threads"], row["mode"]) != ("int8", 2, "decode"):
                continue
            if not row.get("context"):
                of_size = found.setdefault(row["size"], {})
                of_size[row["streams"]] = row["contenders"][OURS]["tokens_per_s"]
        body += [
            [
                _model(name),
                *(f"{rates[number]:,.0f}" if number in rates else "" for number in (1, 8, 64)),
            ]
            for name, rates in found.items()
        ]
    return markdown(["model", "1 stream", "8 streams", "64 streams"], body)


def _model(size: str) -> str:
    """A size as people call it; RWKV-7's have no family in their names."""
    words = {"mamba2": "Mamba-2", "qwen35": "Qwen3.5", "lfm2": "LFM2"}
    family, _, number = size.replace("-", " ").rpartition(" ")
    return f"{words.get(family, 'RWKV-7')} {number}"


def published_file_table() -> str:
    """How far the logits of published files are from the published ones."""
    body = []
    for found in read_result(published_files.RESULT)["files"]:
        differences = [f"{each:.1e}" for each in found["largest_difference"].values()]
        cells = [f"`{found['name']}`", found["source"], f"{found['parameters']:,}"]
        body.append([*cells, f"{found['largest_logit']:.2f}", *differences])
    head = ["file", "from", "parameters", "largest logit"]
    return markdown([*head, *(f"difference, {name}" for name in published_files.BACKENDS)], body)


def size_tables() -> dict[str, str]:
    """Those of docs/start/models.md."""
    return {"choosing": choice_table(), "published files": published_file_table()}


def chat_table(rows: Sequence[Figures]) -> str:
    """On two threads: tokens/s of the bundled chat model by its past, and by those of llama.cpp.

    llama.cpp's own figure is that of the turns with int4.
    """
    found: dict[tuple[int, int], dict[str, Figures]] = {}
    for row in rows:
        if (row["threads"], row["mode"]) == (2, "decode"):
            found.setdefault((row["context"], row["streams"]), {})[row["dtype"]] = row
    body = []
    for (context, streams), of_point in found.items():
        cells = [f"{context:,}", str(streams)]
        for dtype in ("int4", "int8"):
            row = of_point[dtype]
            ratio = row["ratios"].get(PEERS[0])
            times = f" ({ratio:.2f}x)" if ratio else ""
            cells.append(f"{row['contenders'][OURS]['tokens_per_s']:,.0f}{times}")
        row = of_point["int4"]
        theirs = row["contenders"].get(PEERS[0])
        body.append(
            [*cells, f"{theirs['tokens_per_s']:,.0f}" if theirs else _why_not(row, PEERS[0])]
        )
    return markdown(["tokens before", "streams", "int4", "int8", "llama.cpp, Q4_1"], body)


def readme_tables() -> dict[str, str]:
    """What a past costs the bundled chat model, and llama.cpp with its original, in 4 bits."""
    rows = read_result(RESULTS / "checkpoints_smollm2.json")["rows"]
    found = {
        (row["context"], row["streams"]): row
        for row in rows
        if (row["threads"], row["mode"], row["dtype"]) == (2, "decode", "int4")
    }
    contexts, streams = (sorted({point[i] for point in found}) for i in (0, 1))
    body = [
        [f"{context:,}", *(_past_cell(found[context, number]) for number in streams)]
        for context in contexts
    ]
    names = [f"{number} stream{'s' if number > 1 else ''}" for number in streams]
    found_bytes = read_result(CHAT_SESSIONS)
    ours, theirs = (found_bytes[name]["measured_session_bytes"] for name in (OURS, PEERS[0]))
    memory = (
        f"A thousand conversations of {found_bytes['tokens']:,} tokens take {ours / 1e6:.1f} GB; "
        f"in llama.cpp each of them takes {theirs / 1e6:.0f} MB."
    )
    return {"past": markdown(["tokens before", *names], body), "memory": memory}


def _past_cell(row: Figures) -> str:
    ours, theirs = (row["contenders"].get(name) for name in (OURS, PEERS[0]))
    other = f"{theirs['tokens_per_s']:,.0f}" if theirs else "does not fit"
    return f"{ours['tokens_per_s']:,.0f}; {other}"


def llama_tables() -> dict[str, str]:
    """Those of docs/models/llama.md."""
    speed = read_result(RESULTS / "checkpoints_smollm2.json")
    return {
        "smollm2 speed": chat_table(speed["rows"]),
        "smollm2 sessions": chat_session_table(read_result(CHAT_SESSIONS)),
    }


def chat_session_table(found: Figures) -> str:
    """What sessions of one length take, and 1,000 of them."""
    body = []
    for name in (OURS, PEERS[0]):
        of = found[name]
        each = of["measured_session_bytes"]
        thousand = f"{1000 * each / 1e9:,.1f} GB"
        measured = "measured" if of["sessions"] >= 1000 else "computed from those"
        cells = [name, f"{of['sessions']:,}", f"{of['process_bytes'] / 1e9:,.1f} GB"]
        body.append([*cells, f"{each / 1e6:,.2f} MB", f"{thousand}, {measured}"])
    head = ["", "sessions", "memory of the process", "one session more", "1,000 sessions"]
    return markdown(head, body)


def tables() -> dict[str, str]:
    """Those of docs/models/rwkv7.md."""
    return {"speed": summary_table(read_result(RESULT)["rows"])}


def full_tables() -> dict[str, str]:
    """Those of docs/contribute/measurements.md."""
    speed, sizes = read_result(RESULT), read_result(SIZES)["sizes"]
    return {
        "rwkv7 conditions": conditions(speed),
        "rwkv7 speed": full_table(speed["rows"]),
        "loading": loading_table(sizes),
        "many": many_table(sizes),
        "restore": restore_table(read_result(RESTORE)["lengths"]),
        "sockets": socket_table(read_result(SOCKETS)["files"]),
        "family sizes": family_size_table(),
        "edited": edited_table(),
        **family_tables("mamba2"),
        **family_tables("lfm2"),
        **family_tables("qwen35"),
    }
