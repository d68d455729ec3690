"""The benchmark of many replicas: its figures, and the frames of its readers."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.cluster.cost import ratio
from benchmarks.cluster.reader import Times
from benchmarks.cluster.takeover import PARTS, TakeOver, figures
from benchmarks.websocket import PONG, TEXT, frame
from benchmarks.wire import Wire


def test_ratio_is_that_of_each_round_and_counts_the_database() -> None:
    def runs(*speeds: float, **more: float) -> list[dict[str, float]]:
        return [{"tokens_per_s": speed, "server_us_per_token": 200.0, **more} for speed in speeds]

    found = ratio(runs(100, 10, 50, database_us_per_token=20.0), runs(200, 10, 100))
    assert found == {"tokens_per_s": 0.5, "cpu_per_token": 1.1}


def test_wait_is_from_the_last_old_token_to_the_first_new_one() -> None:
    times = Times(last_s=9.9, lost_s=10.1, resumed_s=10.6, event_s=10.6, fresh_s=10.9, num_tries=1)
    seen = {"free": 10.1, "reclaiming": 10.4, "reclaimed": 10.5}
    found = figures([TakeOver("kill", 7, 10.0, [times, times], seen)])
    assert found["p50_ms"] == found["p99_ms"] == found["worst_ms"] == 1000.0
    assert found["parts_p50_ms"] == dict(
        zip(PARTS, [100.0, 300.0, 100.0, 100.0, 300.0], strict=True)
    )
    assert found["by_age"] == {"7": 1000.0}


@pytest.mark.parametrize("length", [1, 125, 126, 4000])
def test_frame_has_its_length(length: int) -> None:
    sent = frame(TEXT, b"x" * length)
    assert sent[0] == 0x81
    size = sent[1] & 0x7F
    assert (size, len(sent)) == ((length, 6 + length) if length < 126 else (126, 8 + length))
    assert sent.endswith(bytes(4) + b"x" * length)
    if length >= 126:
        assert int.from_bytes(sent[2:4], "big") == length


@pytest.mark.parametrize("piece", [1, 3, 1000])
async def test_frames_are_parsed_at_any_chunk_boundary(piece: int) -> None:
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
    assert transport.data.endswith(frame(PONG, b"hi"))  # the pong comes after the message
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
