"""34: ids of 128 random bits or more; an id alone authorises nothing. A real server process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.reliability.servers import STUCK_S, ServerProcess

ALICE, BOB = "key-of-alice", "key-of-bob"
KEYS = {"EVERSTREAM_API_KEYS": f"{ALICE},{BOB}"}
NUM_IDS = 128
NUM_BITS = 128
FLAGS = ("--store", "memory", "--max-sessions", 4 * NUM_IDS)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*FLAGS, environment=KEYS) as started:
        yield started


def client(server: ServerProcess, key: str | None) -> httpx.Client:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=STUCK_S)


def new_ids(server: ServerProcess, number: int) -> list[str]:
    with client(server, ALICE) as http:
        return [http.post("/v1/sessions").json()["session"] for _ in range(number)]


def bits(session: str) -> int:
    """The number in an id; its digits are all that differs from one id to the next."""
    found = re.fullmatch(r"sess_([0-9a-f]{32,})", session)
    assert found is not None, session
    return int(found[1][-32:], 16)


def test_ids_have_128_bits_each_of_which_is_either(server: ServerProcess) -> None:
    """A bit that is drawn is the same in all of 128 ids once in 2^127 times."""
    numbers = [bits(id) for id in new_ids(server, NUM_IDS)]
    assert len(set(numbers)) == NUM_IDS
    ones, zeros = 0, 0
    for number in numbers:
        ones |= number
        zeros |= ~number
    assert ones == (1 << NUM_BITS) - 1
    assert zeros & ones == (1 << NUM_BITS) - 1


def test_ids_do_not_follow_from_one_another(server: ServerProcess) -> None:
    """Neither a counter nor a step: the differences of neighbours are all different, and large."""
    numbers = [bits(id) for id in new_ids(server, NUM_IDS)]
    steps = [abs(b - a) for a, b in pairwise(numbers)]
    assert len(set(steps)) == len(steps)
    assert min(steps) > 1 << 64


def test_another_process_draws_other_ids(server: ServerProcess) -> None:
    first = new_ids(server, 16)
    with ServerProcess(*FLAGS, environment=KEYS) as other:
        assert not set(first) & set(new_ids(other, 16))


def test_id_alone_authorises_nothing(server: ServerProcess) -> None:
    (session,) = new_ids(server, 1)
    for key, status in ((None, 401), ("wrong", 401), (session, 401), (BOB, 404)):
        with client(server, key) as http:
            answers = [
                http.get(f"/v1/sessions/{session}"),
                http.post(f"/v1/sessions/{session}/append", json={"text": "a"}),
                http.post("/v1/completions", json={"session": session, "max_tokens": 1}),
                http.delete(f"/v1/sessions/{session}"),
            ]
            assert [answer.status_code for answer in answers] == [status] * 4, key
    with pytest.raises(InvalidStatus), connect(server.stream_url):
        pass
    with client(server, ALICE) as http:
        assert http.get(f"/v1/sessions/{session}").json()["position"] == 0


def test_nearly_correct_id_is_not_found(server: ServerProcess) -> None:
    (session,) = new_ids(server, 1)
    near = f"sess_{bits(session) ^ 1:032x}"
    others = (near, session.upper(), session[:-1], session + "0", " " + session, session[5:])
    with client(server, ALICE) as http:
        assert [http.get(f"/v1/sessions/{id}").status_code for id in others] == [404] * len(others)
        assert http.get(f"/v1/sessions/{session}").status_code == 200
