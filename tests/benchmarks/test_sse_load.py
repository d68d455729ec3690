"""The load generator for server-sent events: counts what arrives, however it is cut."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from socket import create_server, socket

import pytest

from benchmarks.serve.load import Load, LoadError, percentile_ms, requests_of, run

TOKENS = 5
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer(reason: str = "length") -> bytes:
    """An answer of `TOKENS` tokens and what ends it, as bytes on the wire."""
    texts = [{"choices": [{"text": "a", "finish_reason": None}]}] * TOKENS
    events = [*texts, {"choices": [{"text": "", "finish_reason": reason}]}]
    body = b"".join(chunk(b"data: " + json.dumps(event).encode() + b"\n\n") for event in events)
    return HEAD + body + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


@contextmanager
def server(
    wire: bytes, pieces: int, requests: int
) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """Answers one connection after another with ``wire``, cut into pieces of so many bytes."""
    bodies: list[dict[str, object]] = []

    def talk(connection: socket) -> None:
        with connection, connection.makefile("rb") as reader:
            while reader.readline():
                length = 0
                while (line := reader.readline()) != b"\r\n":
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                bodies.append(json.loads(reader.read(length)))
                for first in range(0, len(wire), pieces):
                    connection.sendall(wire[first : first + pieces])

    def listen() -> None:
        for _ in range(requests):
            talk(listener.accept()[0])

    with closing(create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=listen)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", bodies
        thread.join()


@pytest.mark.parametrize("pieces", [1, 7, 64, 100_000])
def test_answer_is_parsed_at_any_chunk_boundary(pieces: int) -> None:
    with server(answer(), pieces, requests=3) as (url, bodies):
        figures = run(Load(url, num_streams=1, num_requests=3, max_tokens=TOKENS))
    assert figures["tokens"] == 3 * TOKENS
    assert figures["tokens_per_s"] == pytest.approx(3 * TOKENS / figures["seconds"], rel=0.01)
    assert figures["ttft_p50_ms"] > 0
    assert [body["max_tokens"] for body in bodies] == [TOKENS] * 3


def test_requests_of_a_run_differ_and_are_the_same_again() -> None:
    load = Load("http://127.0.0.1:1", num_streams=2, num_requests=2)
    found = [request for stream in range(2) for request in requests_of(load, stream)]
    assert len(set(found)) == 4
    assert found == [request for stream in range(2) for request in requests_of(load, stream)]


def test_llama_is_told_to_do_no_more_than_others() -> None:
    load = Load("http://127.0.0.1:1", num_streams=1, num_requests=1, dialect="llama")
    body = json.loads(requests_of(load, 0)[0].partition(b"\r\n\r\n")[2])
    assert body["samplers"] == ["top_k", "temperature"]
    assert body["cache_prompt"] is False
    assert body["ignore_eos"] is True


def test_answer_that_ends_early_is_a_failure() -> None:
    with (
        server(answer("stop"), 64, requests=1) as (url, _),
        pytest.raises(LoadError, match="did not end for its length"),
    ):
        run(Load(url, num_streams=1, num_requests=1, max_tokens=TOKENS))


def test_connection_that_ends_is_a_failure() -> None:
    listener = create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def hang_up() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)

    thread = threading.Thread(target=hang_up)
    thread.start()
    with closing(listener), pytest.raises(LoadError, match="closed the connection"):
        run(Load(url, num_streams=1, num_requests=1))
    thread.join()


def test_percentiles() -> None:
    assert percentile_ms([], 50) is None
    assert percentile_ms([0.25], 99) == 250.0
    assert percentile_ms([n / 1000 for n in range(101)], 50) == 50.0
    assert percentile_ms([n / 1000 for n in range(101)], 99) == 99.0
