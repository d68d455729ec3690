"""The soak's own judgement: each thing that must not be left over, lost or said is noticed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.soak.verdict import MIB, Ending, Observation, verdict
from benchmarks.soak.wire import Broken, Tally, checked_refusal, checked_stream

REST = Observation(0, 0, 0, 0, 0, num_descriptors=7, resident_bytes=400 * MIB)
GOOD_ENDING = Ending(0, "INFO started\nINFO stopped\n")


def judge(
    after: Observation = REST, tally: Tally | None = None, ending: Ending = GOOD_ENDING
) -> list[str]:
    return verdict(REST, REST, after, tally or Tally(), ending)


def test_idle_server_passes() -> None:
    refused = Tally(statuses=Counter({200: 90, 400: 5, 503: 7}))
    assert judge(replace(REST, resident_bytes=415 * MIB), refused) == []


@pytest.mark.parametrize(
    ("left", "named"),
    [
        ({"held_slots": 1}, "1 slots"),
        ({"num_sessions": 2}, "2 sessions"),
        ({"num_running": 1}, "1 requests run"),
        ({"num_waiting": 3}, "3 requests wait"),
        ({"num_websockets": 1}, "1 WebSockets"),
        ({"num_descriptors": 8}, "1 file descriptors"),
        ({"resident_bytes": 421 * MIB}, "21.0 MiB"),
    ],
)
def test_leftover_is_named(left: dict[str, int], named: str) -> None:
    (failure,) = judge(replace(REST, **left))
    assert named in failure


def test_problem_of_a_visit_fails() -> None:
    tally = Tally()
    tally.problem("stream", Broken("seq"))
    assert judge(tally=tally) == ["stream: Broken: seq"]


def test_internal_error_fails() -> None:
    assert judge(tally=Tally(statuses=Counter({500: 2}))) == ["2 answers had status 500"]


@pytest.mark.parametrize(
    ("ending", "named"),
    [
        (Ending(1, ""), "exit code 1"),
        (Ending(0, "INFO a\nTraceback (most recent call last):\n  x\n"), "Traceback"),
        (Ending(0, "12:00:00 INFO a\n12:00:01 ERROR everstream: oh\n"), "ERROR everstream: oh"),
    ],
)
def test_bad_ending_fails(ending: Ending, named: str) -> None:
    (failure,) = judge(ending=ending)
    assert named in failure


def frames() -> list[dict[str, Any]]:
    """A stream of three tokens after a prompt of two, in a session that was four long."""
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    tokens = [
        {"type": "token", "seq": 2 + i, "position": 6 + i, "token_id": i, "text": "a"}
        for i in range(3)
    ]
    end = {"session": None, "seq": 5, "position": 9, "text": "b", "finish_reason": "length"}
    return [
        {"type": "started", "position": 4},
        *tokens,
        {"type": "finished", **end, "usage": usage},
    ]


def test_whole_stream_is_read() -> None:
    stream = checked_stream(frames())
    assert (stream.tokens, stream.text, stream.position) == ((0, 1, 2), "aaab", 9)


@pytest.mark.parametrize(
    ("frame", "change"),
    [
        (0, {"type": "token"}),
        (1, {"seq": 3}),
        (2, {"position": 6}),
        (4, {"seq": 6}),
        (4, {"position": 10}),
        (4, {"finish_reason": "error"}),
        (4, {"usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}}),
        (4, {"usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 6}}),
    ],
)
def test_stream_whose_numbers_do_not_add_up_is_broken(frame: int, change: dict[str, Any]) -> None:
    wrong = frames()
    wrong[frame] |= change
    with pytest.raises(Broken):
        checked_stream(wrong)


def test_lost_token_is_broken() -> None:
    with pytest.raises(Broken):
        checked_stream(frames()[:2] + frames()[3:])


def test_cancel_before_the_start_is_no_break() -> None:
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    end = {**frames()[-1], "finish_reason": "cancelled", "usage": usage}
    assert checked_stream([end]).tokens == ()


def test_only_a_full_server_may_refuse() -> None:
    assert checked_refusal(503, {"error": {"code": "capacity_exhausted"}}) == "capacity_exhausted"
    for status, code in ((503, "draining"), (500, "internal_error"), (400, "capacity_exhausted")):
        with pytest.raises(Broken):
            checked_refusal(status, {"error": {"code": code}})
