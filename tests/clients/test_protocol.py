from __future__ import annotations

import json
import math

import pytest

from clients.python import (
    Appended,
    AuthenticationError,
    CapacityExhausted,
    EverstreamError,
    HistoryGone,
    InternalServerError,
    InvalidRequest,
    KeyInUse,
    NotFound,
    ProtocolError,
    Resumed,
    SessionAttached,
    SessionBroken,
    SessionBusy,
    SessionMigrated,
    SessionNotFound,
    SessionReset,
    SnapshotMismatch,
    StoreFailed,
    StoreFull,
    Token,
    TopLogprob,
    Usage,
    calls,
)
from clients.python.errors import error_of
from clients.python.protocol import Protocol

TOKEN = {"type": "token", "request_id": "r1", "seq": 1, "position": 5, "token_id": 7, "text": "é"}


@pytest.fixture
def protocol() -> Protocol:
    return Protocol("http://host:8000/base/", "key")


def test_addresses_keep_the_path_of_a_proxy(protocol: Protocol) -> None:
    assert protocol.base_url == "http://host:8000/base"
    assert protocol.stream_url == "ws://host:8000/base/v1/stream"
    assert Protocol("https://host", None).stream_url == "wss://host/v1/stream"


def test_key_travels_in_the_header_alone(protocol: Protocol) -> None:
    assert protocol.headers == {"Authorization": "Bearer key"}
    assert "key" not in protocol.stream_url
    assert Protocol("http://host", None).headers == {}


def test_message_omits_none_and_numbers_requests(protocol: Protocol) -> None:
    first, message = protocol.message("generate", prompt="é", session=None, seed=0)
    assert json.loads(message) == {
        "type": "generate",
        "request_id": first,
        "prompt": "é",
        "seed": 0,
    }
    assert protocol.message("create")[0] != first


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), range(1, 3)])
def test_token_ids_may_be_any_sequence(protocol: Protocol, ids: list[int]) -> None:
    assert json.loads(protocol.message("append", tokens=ids)[1])["tokens"] == [1, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, "\ud800", object(), [math.nan]])
def test_what_json_cannot_carry_is_refused_by_name(protocol: Protocol, value: object) -> None:
    for build in (
        lambda: protocol.message("x", top_p=value),
        lambda: calls.complete("", top_p=value),
    ):
        with pytest.raises(InvalidRequest) as caught:
            build()
        assert caught.value.param == "top_p"


def test_event_of_a_later_server_is_read_as_far_as_it_is_known() -> None:
    event = Protocol.event(json.dumps({**TOKEN, "mood": "good"}))
    assert event == Token("r1", 1, 5, 7, "é")
    assert Protocol.event('{"type": "drift", "request_id": "r1"}') is None


def test_token_has_its_logprob() -> None:
    more = {"logprob": -0.5, "top_logprobs": [{"token_id": 7, "logprob": -0.5}]}
    event = Protocol.event(json.dumps({**TOKEN, **more}))
    assert event == Token("r1", 1, 5, 7, "é", -0.5, (TopLogprob(7, -0.5),))


@pytest.mark.parametrize("frame", ["", "[]", "3", "{}", '{"type": "token"}', '{"type": "error"}'])
def test_frame_that_is_no_event_is_a_protocol_error(frame: str) -> None:
    with pytest.raises(ProtocolError):
        Protocol.event(frame)


@pytest.mark.parametrize("content", [b"", b"<html>", b"[]"])
def test_answer_that_is_no_json_object_is_a_protocol_error(content: bytes) -> None:
    with pytest.raises(ProtocolError):
        calls.models().result(200, content, {})


def test_foreign_json_is_a_protocol_error() -> None:
    for call in (
        calls.complete("x"),
        calls.session_info("s"),
        calls.models(),
        calls.sessions(None, 1),
    ):
        with pytest.raises(ProtocolError):
            call.result(200, b'{"hello": "world"}', {})


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_value", InvalidRequest),
        (401, "invalid_api_key", AuthenticationError),
        (403, "foreign_origin", AuthenticationError),
        (404, "session_not_found", SessionNotFound),
        (404, "model_not_found", NotFound),
        (405, "method_not_allowed", NotFound),
        (409, "session_busy", SessionBusy),
        (409, "session_attached", SessionAttached),
        (409, "key_in_use", KeyInUse),
        (409, "snapshot_mismatch", SnapshotMismatch),
        (410, "history_gone", HistoryGone),
        (410, "session_broken", SessionBroken),
        (410, "snapshot_broken", SessionBroken),
        (413, "body_too_large", InvalidRequest),
        (429, "queue_full", CapacityExhausted),
        (500, "internal_error", InternalServerError),
        (502, None, InternalServerError),
        (503, "draining", CapacityExhausted),
        (503, "migrated", SessionMigrated),
        (503, "store_failed", StoreFailed),
        (507, "store_full", StoreFull),
    ],
)
def test_error_has_the_type_of_its_code(
    status: int, code: str | None, kind: type[EverstreamError]
) -> None:
    error = error_of(status, {"error": {"message": "m", "param": "p", "code": code}})
    assert type(error) is kind
    assert (error.message, error.param, error.code, error.status) == ("m", "p", code, status)


@pytest.mark.parametrize(
    ("header", "seconds"), [("5", 5.0), (None, None), ("Wed, 21 Oct 2026 07:28:00 GMT", None)]
)
def test_retry_after_is_seconds_or_unknown(header: str | None, seconds: float | None) -> None:
    error = error_of(503, None, header)
    assert isinstance(error, CapacityExhausted)
    assert error.retry_after_s == seconds


def test_every_error_may_have_retry_after() -> None:
    assert error_of(409, {"error": {"code": "key_in_use"}}, "1").retry_after_s == 1
    assert error_of(507, {"error": {"code": "store_full"}}).retry_after_s is None


def test_retry_after_of_a_frame_is_in_its_body() -> None:
    limited = {"error": {"code": "rate_limited", "retry_after_s": 0.4}}
    assert error_of(429, limited).retry_after_s == 0.4
    assert error_of(429, limited, "1").retry_after_s == 0.4  # the header has whole seconds
    assert error_of(429, {"error": {"retry_after_s": [1]}}).retry_after_s is None


RESUMED = {
    "request_id": "r1",
    "session": "s",
    "epoch": "store-2",
    "seq": 3,
    "last_seq": 9,
    "position": 20,
    "busy": True,
}


def test_resume_sends_its_cursor() -> None:
    event = Protocol.event(json.dumps({"type": "resumed", **RESUMED}))
    assert event == Resumed("r1", "s", "store-2", 3, 9, 20, busy=True)
    assert Protocol.checked(event) is event


def test_reset_is_an_error_with_the_session_position() -> None:
    event = Protocol.event(json.dumps({"type": "reset", **RESUMED, "reason": "rewound"}))
    assert event is not None
    with pytest.raises(SessionReset, match="rewound") as caught:
        Protocol.checked(event)
    assert (caught.value.session, caught.value.epoch, caught.value.last_seq) == ("s", "store-2", 9)


def test_migrate_is_an_error() -> None:
    frame = {"type": "migrate", "request_id": "r1", "session": "s", "epoch": "e", "seq": 4}
    event = Protocol.event(json.dumps({**frame, "position": 5}))
    assert event is not None
    with pytest.raises(SessionMigrated):
        Protocol.checked(event)


def test_lists_of_a_frame_are_frozen() -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}
    frame = {"type": "appended", "request_id": "r1", "session": "s", "position": 2, "usage": usage}
    event = Protocol.event(json.dumps({**frame, "logprobs": [-1.5]}))
    assert event == Appended("r1", "s", 2, Usage(2, 0, 2), (-1.5,))
