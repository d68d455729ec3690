"""The benchmark of the bundled chat model: its costs, its past, its tables."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from benchmarks.checkpoints import chat
from benchmarks.checkpoints.__main__ import arguments
from benchmarks.checkpoints.llama_state import repeated
from benchmarks.decode.peers import Point
from benchmarks.report import Figures
from benchmarks.studies.pages.models import chat_session_table, chat_table, table
from model.state import StateLayout


def point(streams: int, context: int, mode: str = "decode") -> Point:
    return Point(chat.SIZE, "int4", streams, context, 2, mode)


def test_family_has_one_size_and_its_own_result() -> None:
    options = arguments(["--family", "smollm2"])
    assert (options.size, options.peer) == ([chat.SIZE], ["llama.cpp"])
    assert options.output.name == "checkpoints_smollm2.json"


def test_step_of_the_original_reads_its_whole_past() -> None:
    def past(streams: int, context: int) -> int:
        longer = chat.original_cost(100, point(streams, context)).num_bytes
        return longer - chat.original_cost(100, point(streams, 0)).num_bytes

    assert past(1, 4096) == 4096 * chat.position_bytes() == 4096 * 23_040
    assert past(8, 4096) == 8 * past(1, 4096)


def test_step_of_constant_state_reads_its_state_and_writes_its_sums() -> None:
    def cost(context: int) -> int:
        return chat.state_cost(1 << 27, point(1, context)).num_bytes

    layout = StateLayout.of(chat.CONFIG)
    sums = sum(f.spec.num_bytes for f in layout.fields if f.name in ("S", "z"))
    early = sum(min(chat.ROOM // 2, plan.context) for plan in chat.CONFIG.windows)
    early_bytes = early * chat.position_bytes() // chat.CONFIG.num_hidden_layers
    assert cost(4096) == cost(32_768)
    assert cost(4096) - cost(0) == layout.num_bytes + sums - early_bytes


def test_prompt_computes_a_product_for_each_token() -> None:
    prompt, one = (chat.original_cost(0, point(1, 0, mode)) for mode in ("prefill", "decode"))
    assert prompt.operations > 300 * one.operations


def saved(length: int, transposed: bool, layers: int = 2, width: int = 3) -> np.ndarray:
    """A sequence of 16-bit numbers as llama.cpp saves it, second of two streams empty."""

    def words(*values: int) -> bytes:
        return np.array(values, np.uint32).tobytes()

    cells = b"".join(words(position, 1, 0) for position in range(length))
    parts = [words(7, 0, 2, length), cells, words(transposed, layers)]
    numbers = np.arange(length * width, dtype=np.uint16).reshape(length, width)
    for kind in ("k", "v"):
        for layer in range(layers):
            values = numbers + 100 * layer
            if kind == "v" and transposed:
                parts.append(words(1, 2, width) + values.T.tobytes())
            else:
                parts.append(words(1) + np.uint64(2 * width).tobytes() + values.tobytes())
    return np.frombuffer(b"".join([*parts, words(0)]), np.uint8)


def test_repeated_past_has_the_same_values_at_later_positions() -> None:
    for transposed in (False, True):
        once = saved(4, transposed)
        assert repeated(once, 1).tobytes() == once.tobytes()
        thrice = repeated(once, 3)
        assert len(thrice) - len(once) == 2 * 4 * (12 + 2 * 2 * 3 * 2)
        cells = thrice[16 : 16 + 12 * 12].view(np.int32).reshape(12, 3)
        assert cells.tolist() == [[position, 1, 0] for position in range(12)]
        keys = thrice[16 + 144 + 8 + 12 :][: 12 * 6].view(np.uint16).reshape(3, 4, 3)
        assert (keys == np.arange(12).reshape(4, 3)).all()
    values = thrice[-4 - 72 :][:72].view(np.uint16).reshape(3, 3, 4)  # transposed: width first
    assert (values == 100 + np.arange(12).reshape(4, 3).T[:, None]).all()


def test_rows_that_do_not_fit_say_why() -> None:
    def row(dtype: str, streams: int, ours: float, theirs: float | None) -> Figures:
        found: Figures = {"everstream": {"tokens_per_s": ours, "fraction": 0.5, "bound": "-"}}
        if theirs:
            found["llama.cpp"] = {"tokens_per_s": theirs}
        return {
            **asdict(Point(chat.SIZE, dtype, streams, 4096, 2)),
            "contenders": found,
            "ratios": {"llama.cpp": ours / theirs} if theirs else {},
            "skipped": {} if theirs else {"llama.cpp": "its cache would take 45.2 GiB"},
        }

    rows = [row("int4", 1, 90, 45), row("int8", 1, 60, 40)]
    rows += [row("int4", 64, 500, None), row("int8", 64, 600, None)]
    lines = chat_table(rows).splitlines()
    assert lines[2] == "| 4,096 | 1 | 90 (2.00x) | 60 (1.50x) | 45 |"
    assert lines[3] == "| 4,096 | 64 | 500 | 600 | not run: its cache would take 45.2 GiB |"
    assert "| not run: its cache would take 45.2 GiB |  |" in table(rows)


def test_memory_of_sessions_says_what_was_computed() -> None:
    def found(sessions: int, each: int) -> Figures:
        return {
            "sessions": sessions,
            "process_bytes": 4_000_000_000,
            "measured_session_bytes": each,
        }

    lines = chat_session_table(
        {"everstream": found(1000, 6_000_000), "llama.cpp": found(16, 190_000_000)}
    ).splitlines()
    assert lines[2].endswith("| 6.00 MB | 6.0 GB, measured |")
    assert lines[3].endswith("| 190.00 MB | 190.0 GB, computed from those |")
