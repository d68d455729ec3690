"""Whatever a session is made of comes back from JSON as it went in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.session import (
    Accepted,
    Constraint,
    Deleted,
    Entry,
    Opened,
    Progress,
    Rewound,
    Saved,
    SessionValue,
    UnfedSegment,
)
from server.engine.types import Dry, Finished, Request, SamplingParams, TokenEvent, Usage
from server.store.codec import (
    Malformed,
    build,
    decode_json,
    decode_value,
    encode,
    pack_entries,
    unpack_entries,
)

counts = st.integers(0, 2**62)
tokens = st.lists(st.integers(0, 2**31), max_size=5).map(tuple)
finite = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(max_size=5)

params = st.builds(
    SamplingParams,
    temperature=finite,
    top_p=finite,
    seed=st.integers(-(2**63), 2**64 - 1),
    max_tokens=counts,
    stop=st.lists(names, max_size=3).map(tuple),
    stop_token_ids=tokens,
    ignore_eos=st.booleans(),
    typical_p=finite,
    top_n_sigma=finite,
    xtc_probability=finite,
    xtc_threshold=finite,
    dry=st.none() | st.builds(Dry, finite, finite, counts, counts, tokens),
    logit_bias=st.lists(st.tuples(counts, finite), max_size=3).map(tuple),
    top_logprobs=st.none() | counts,
    grammar=st.none() | names,
)
requests = st.builds(
    Request,
    names,
    names,
    tokens,
    st.none() | params,
    session=st.none() | names,
    keep=st.booleans(),
    key=st.none() | names,
    num_top=counts,
    continuations=st.lists(tokens, max_size=2).map(tuple),
    embed=st.booleans(),
)
tops = st.lists(st.tuples(counts, finite), max_size=3).map(tuple)
values = st.builds(
    SessionValue,
    names,
    names,
    epoch=counts,
    position=counts,
    unfed=st.lists(st.builds(UnfedSegment, tokens, counts), max_size=3).map(tuple),
    pending=st.none() | counts,
    seq=counts,
    log_index=counts,
    recent=tokens,
    undecoded=st.binary(max_size=4),
    progress=st.none() | st.builds(Progress, requests, counts, counts, names),
    constraint=st.none() | st.builds(Constraint, names, tokens),
)
token = (names, counts, counts, counts, names)
token_events = st.one_of(
    st.builds(TokenEvent, *token, st.none(), st.just(())),
    st.builds(TokenEvent, *token, finite, tops),
)
entries = st.one_of(
    token_events,
    token_events,
    st.builds(Accepted, requests, tokens, counts, counts),
    st.builds(
        Finished,
        names,
        st.none() | names,
        counts,
        counts,
        names,
        st.sampled_from(["stop", "length", "cancelled", "error", None]),
        st.builds(Usage, counts, counts),
        st.none() | names,
        logprobs=st.none() | st.lists(finite, max_size=3).map(tuple),
        logprob_sum=st.none() | finite,
        tops=st.none() | st.lists(tops, max_size=3).map(tuple),
        embedding=st.none() | st.lists(finite, max_size=3).map(tuple),
        grammar_ended=st.booleans(),
    ),
    st.builds(Opened, values),
    st.builds(Saved, values, st.booleans()),
    st.builds(Rewound, values),
    st.just(Deleted()),
)


@given(values)
def test_value_round_trips(value: SessionValue) -> None:
    assert decode_value(encode(value)) == value


@given(st.lists(entries, max_size=8), st.none() | names)
def test_entries_round_trip(log: list[Entry], running: str | None) -> None:
    back = unpack_entries(pack_entries(log, running), running)
    assert back == log
    assert [type(entry) for entry in back] == [type(entry) for entry in log]


def test_a_token_costs_few_bytes() -> None:
    log: list[Entry] = [
        TokenEvent("a-long-request-id", n, 1000 + n, 500, " tok") for n in range(256)
    ]
    assert len(pack_entries(log, "a-long-request-id")) < 256 * 25


def test_tokens_with_and_without_logprobs_mix() -> None:
    plain = TokenEvent("r", 1, 5, 500, " tok")
    rich = TokenEvent("r", 2, 6, 501, "", -0.1, ((501, -0.1), (7, -2.30258509299404568)))
    thinking = TokenEvent("r", 3, 7, 502, "", thought="we")
    data = pack_entries([plain, rich, thinking, plain], "r")
    assert unpack_entries(data, "r") == [plain, rich, thinking, plain]
    assert data.count(b'[1,5,500," tok"]') == 2


@pytest.mark.parametrize("wrong", [b"[[501]]", b'[[501,"x"]]', b"[501,-0.1]", b"null"])
def test_malformed_logprobs_are_refused(wrong: bytes) -> None:
    data = pack_entries([TokenEvent("r", 2, 6, 501, "", -0.1, ((501, -0.1),))], "r")
    assert b"[[501,-0.1]]" in data
    with pytest.raises(Malformed):
        unpack_entries(data.replace(b"[[501,-0.1]]", wrong), "r")


def test_fields_that_an_older_log_lacks_take_their_defaults() -> None:
    assert decode_value(b'{"id": "s", "owner": "ann"}') == SessionValue("s", "ann")


def test_request_of_a_log_before_top_n_sigma_is_read_as_one_without() -> None:
    accepted = Accepted(Request("r", "ann", (1, 2), SamplingParams(seed=7)), (), 0, 1)
    data = pack_entries([accepted], None)
    assert data.count(b',"top_n_sigma":0.0') == 1
    assert unpack_entries(data.replace(b',"top_n_sigma":0.0', b""), None) == [accepted]


def test_request_of_a_log_before_dry_and_xtc_is_read_as_one_without() -> None:
    accepted = Accepted(Request("r", "ann", (1, 2), SamplingParams(seed=7)), (), 0, 1)
    data = pack_entries([accepted], None)
    new = b',"xtc_probability":0.0,"xtc_threshold":0.1,"dry":null'
    assert data.count(new) == 1
    assert unpack_entries(data.replace(new, b""), None) == [accepted]


VALUE = replace(SessionValue("s", "ann"), unfed=(UnfedSegment((1, 2), 3),), undecoded=b"\xc3")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (b'"epoch":0', b'"epoch":true'),
        (b'"epoch":0', b'"epoch":"0"'),
        (b'"epoch":0', b'"epoch":0.0'),
        (b'"epoch":0', b'"epochs":0'),
        (b'"id":"s",', b""),
        (b"[[1,2],3]", b"[[1,true],3]"),
        (b"[[1,2],3]", b"[[1,2],3,4]"),
        (b"[[1,2],3]", b"[[1,2]]"),
        (b"[[1,2],3]", b'{"a":1}'),
        (b'"c3"', b'"c"'),
        (b'"pending":null', b'"pending":[]'),
        (b'"state":null', b'"state":"x"'),
        (b"}", b""),
    ],
)
def test_malformed_value_is_refused(right: bytes, wrong: bytes) -> None:
    data = encode(VALUE)
    assert right in data
    with pytest.raises(Malformed):
        decode_value(data.replace(right, wrong))


def test_a_word_that_is_no_choice_is_refused() -> None:
    finished = Finished("r", None, 1, 1, "", "stop", Usage(1, 1))
    with pytest.raises(Malformed):
        build(Finished, decode_json(encode(finished).replace(b'"stop"', b'"preemptible"')))
