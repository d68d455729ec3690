"""16: nothing is ever unpacked, so that a small message cannot become a large one."""

from __future__ import annotations

import gzip
import zlib

import pytest

from benchmarks.websocket import BINARY, TEXT, frame, handshake
from tests.reliability.bystander import bystander
from tests.reliability.raw_websocket import connected, opened
from tests.reliability.servers import FAKE, ServerProcess
from tests.server.harness import running

OFFERS = [
    "permessage-deflate",
    "permessage-deflate; client_max_window_bits; server_no_context_takeover",
    "permessage-deflate; server_max_window_bits=8, permessage-deflate",
    "x-webkit-deflate-frame",
    "permessage-bzip2, permessage-deflate",
]
#: 64 MiB of spaces, which is JSON up to where it ends.
UNPACKED_BYTES = 64 << 20
SLACK_BYTES = 8 << 20


def deflated(data: bytes) -> bytes:
    """A payload as RFC 7692 has it, without its last four bytes."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return (packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH))[:-4]


@pytest.mark.parametrize("offer", OFFERS)
async def test_offered_compression_is_not_accepted(offer: str) -> None:
    async with running() as server, connected(server.port) as client:
        await client.shake_hands(handshake(sec_websocket_extensions=offer))
        assert client.status == 101
        assert "sec-websocket-extensions" not in client.headers
        await client.ask(type="create", request_id="a")
        assert (await client.receive_json())["type"] == "created"


@pytest.mark.parametrize("opcode", [TEXT, BINARY])
@pytest.mark.parametrize("rsv", [1, 2, 4, 7])
async def test_frame_with_a_reserved_bit_closes_with_1002(opcode: int, rsv: int) -> None:
    async with running() as server, connected(server.port) as client:
        await client.shake_hands(handshake(sec_websocket_extensions="permessage-deflate"))
        await client.send(frame(opcode, deflated(b'{"type": "create"}'), rsv=rsv))
        assert await client.close_code() == 1002


async def test_bombs_cost_no_memory_and_disturb_no_client() -> None:
    bomb = bytes(UNPACKED_BYTES).replace(b"\0", b" ")
    packed, zipped = deflated(bomb), gzip.compress(bomb)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(zipped)
    with ServerProcess(program=FAKE) as server:
        async with bystander(server.port) as other:
            resident_bytes = server.resident_bytes()
            for _ in range(5):
                async with opened(server.port) as client:
                    await client.send(frame(TEXT, packed, rsv=4))
                    assert await client.close_code() == 1002
                async with connected(server.port) as client:
                    await client.shake_hands(head + zipped)
                    assert client.status == 415
            await other.more()
            assert server.resident_bytes() - resident_bytes < SLACK_BYTES
