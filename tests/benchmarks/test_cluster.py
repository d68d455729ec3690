"""The benchmark of many replicas: real processes in its short form, and its committed results."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from benchmarks.cluster import __main__ as cluster
from benchmarks.cluster import page as cluster_page
from benchmarks.cluster.cost import ratio
from benchmarks.cluster.paper import REMEDIES, Assumptions, Inputs, inputs_of, model
from benchmarks.cluster.reader import Times
from benchmarks.cluster.takeover import PARTS, Strike, figures
from benchmarks.wire import Wire, masked
from tests.docs.pages import page

COMMITTED = cluster_page.read()

INPUTS = Inputs(
    tokens_per_s=3000.0,
    streams=64,
    commits_per_s=45.0,
    wal_bytes_per_token=1000.0,
    database_us_per_token=20.0,
    state_bytes=1 << 20,
    stored_bytes=1 << 21,
    notice_p50_ms=1.0,
    connections=3.0,
    idle_transactions_per_s=10.0,
    idle_database_cpu=0.01,
)
GIVEN = Assumptions(
    state_memory_gib=1.0,
    database_cores=10.0,
    database_connections=300,
    database_wal_mib_s=1000.0,
    database_disk_tib=1.0,
    turn_tokens=300,
    moved_turns=0.1,
)


def test_ratio_is_that_of_each_round_and_counts_the_database() -> None:
    def runs(*speeds: float, **more: float) -> list[dict[str, float]]:
        return [{"tokens_per_s": speed, "server_us_per_token": 200.0, **more} for speed in speeds]

    found = ratio(runs(100, 10, 50, database_us_per_token=20.0), runs(200, 10, 100))
    assert found == {"tokens_per_s": 0.5, "cpu_per_token": 1.1}


def test_what_machines_ask_for_grows_and_what_there_is_does_not() -> None:
    ten, thousand = model(INPUTS, GIVEN, 10), model(INPUTS, GIVEN, 1000)
    assert (ten["streams"], ten["commits_per_s"], ten["connections"]) == (640, 450, 30)
    assert ten["busy_cores"] == 0.6
    assert ten["sessions_in_memory"] == 10 * 1024
    assert ten["sessions_asleep"] == thousand["sessions_asleep"] == 1 << 19
    assert ten["notices_per_s"] == 20  # 10 of 100 turns move, with a question and an answer
    assert ten["shares"] == {"cores": 0.07, "log": 0.0286, "notices": 0.02, "connections": 0.1}
    assert (ten["first"], ten["machines_at_most"]) == ("connections", 100)
    for name, share in ten["shares"].items():
        assert thousand["shares"][name] == pytest.approx(100 * share, rel=0.01)


def test_another_resource_is_first_where_it_is_scarce() -> None:
    given = Assumptions(database_cores=0.1, database_connections=10**6)
    found = model(INPUTS, given, 10)
    assert found["first"] == "cores"
    assert found["then"] == REMEDIES["cores"]


def test_wait_is_from_the_last_old_token_to_the_first_new_one() -> None:
    times = Times(last_s=9.9, lost_s=10.1, resumed_s=10.6, event_s=10.6, fresh_s=10.9, num_tries=1)
    seen = {"free": 10.1, "burying": 10.4, "buried": 10.5}
    found = figures([Strike("kill", 7, 10.0, [times, times], seen)])
    assert found["p50_ms"] == found["p99_ms"] == found["worst_ms"] == 1000.0
    assert found["parts_p50_ms"] == dict(
        zip(PARTS, [100.0, 300.0, 100.0, 100.0, 300.0], strict=True)
    )
    assert found["by_age"] == {"7": 1000.0}


@pytest.mark.parametrize("length", [1, 125, 126, 4000])
def test_frame_says_its_length(length: int) -> None:
    frame = masked(b"x" * length)
    assert frame[0] == 0x81
    size = frame[1] & 0x7F
    assert (size, len(frame)) == ((length, 6 + length) if length < 126 else (126, 8 + length))
    assert frame.endswith(bytes(4) + b"x" * length)
    if length >= 126:
        assert int.from_bytes(frame[2:4], "big") == length


def shape(result: Any) -> Any:
    """The names of all figures; those of streams, replicas and ages are numbers."""
    if not isinstance(result, dict):
        return None
    return {
        "number" if name.isdigit() else name: shape(value)
        for name, value in result.items()
        if name != "rounds"
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_part_runs_and_the_committed_results_have_its_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster.main(["--quick"])
    *shown, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    parts = result["parts"]
    assert parts.keys() == cluster.PARTS.keys()
    for name in ("cost of the store", "take-over", "idle", "on paper"):
        assert any(line.startswith(name) for line in shown), name

    shared = parts["cost"]["shared"]["2"]
    assert shared["tokens_per_s"] > 0 and shared["commits_per_s"] > 0
    assert shared["database_us_per_token"] > 0 and shared["wal_bytes_per_token"] > 0
    for kind, by_streams in parts["takeover"].items():
        for streams, found in by_streams.items():
            assert found["num"] >= int(streams), kind
            assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["worst_ms"]
    assert parts["takeover"]["kill"]["1"]["parts_p50_ms"].keys() == set(PARTS)
    given = Assumptions(**result["paper"]["assumed"])
    inputs = inputs_of(parts, 2)
    assert result["paper"]["machines"] == [model(inputs, given, num) for num in (10, 1000)]

    assert not COMMITTED["settings"]["quick"]
    assert shape(COMMITTED) == shape(result)


def test_committed_paper_follows_from_the_committed_measurements() -> None:
    paper, settings = COMMITTED["paper"], COMMITTED["settings"]
    inputs = inputs_of(COMMITTED["parts"], max(settings["streams"]))
    given = Assumptions(**paper["assumed"])
    assert paper["machines"] == [model(inputs, given, num) for num in settings["machines"]]
    assert {one["machines"] for one in paper["machines"]} >= {10, 1000}


@pytest.mark.parametrize("table", cluster_page.tables(COMMITTED))
def test_table_of_the_page_is_the_one_that_the_results_give(table: str) -> None:
    assert table in page("scale.md")


@pytest.mark.parametrize("piece", [1, 3, 1000])
async def test_frames_are_read_wherever_the_network_cuts_them(piece: int) -> None:
    frames: list[bytes] = []
    wire = Wire({"type": "create", "request_id": "r"}, frames.append)
    transport = Sent()
    wire.connection_made(transport)
    long = b"y" * 300
    answer = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\n\r\n"
    answer += b"\x81\x01x" + b"\x89\x02hi" + b"\x81\x7e\x01\x2c" + long
    for start in range(0, len(answer), piece):
        wire.data_received(answer[start : start + piece])
    assert frames == [b"x", long]
    assert transport.data.endswith(masked(b"hi", 0xA))  # the pong comes after the message
    assert b'"create"' in transport.data
    wire.connection_lost(None)
    assert wire.ended.done()


class Sent(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data += bytes(data)
