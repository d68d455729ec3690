"""The file of a named state: what goes out comes in, and nothing of another model does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from server.engine.session import Constraint, SessionValue, UnfedSegment
from server.store.base import ImportRefused, SnapshotMismatch
from server.store.states import (
    NamedState,
    about_of,
    export_session,
    export_state,
    import_session,
    import_state,
    named_state,
    tuned_state,
)
from tests.server.store.records import IDENTITY, block

VALUE = SessionValue(
    "s", "ann", epoch=2, position=3, pending=4, seq=7, log_index=9, recent=(1, 2, 3), state=block(3)
)


def file_of(state: NamedState) -> bytes:
    return b"".join(export_state(state, IDENTITY))


@pytest.mark.parametrize("state", [named_state(VALUE, "Once"), tuned_state(block(0))])
def test_state_round_trips(state: NamedState) -> None:
    found = import_state(file_of(state), IDENTITY)
    assert replace(found.value, state=None) == replace(state.value, state=None)
    assert found.value.state is not None
    assert state.value.state is not None
    assert bytes(found.value.state.data) == bytes(state.value.state.data)
    assert (found.digest, found.prompt) == (state.digest, state.prompt)


def test_state_has_no_owner_or_session() -> None:
    value = named_state(VALUE).value
    assert (value.id, value.owner, value.epoch, value.seq, value.log_index) == ("", "", 0, 0, 0)
    assert (value.length, value.origin and value.origin.length) == (4, 4)


def test_digest_is_of_the_state_and_the_tokens_around_it() -> None:
    digest = named_state(VALUE).digest
    assert named_state(replace(VALUE, id="other", seq=1), "text").digest == digest
    others = [
        replace(VALUE, state=block(4)),
        replace(VALUE, pending=5),
        replace(VALUE, position=2),
        replace(VALUE, recent=(1, 2, 4)),
        replace(VALUE, undecoded=b"\xc3"),
    ]
    assert len({named_state(value).digest for value in others} | {digest}) == 6


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (SessionValue("s", "ann"), "has read nothing"),
        (replace(VALUE, position=0, state=None), "has read nothing"),
        (replace(VALUE, unfed=(UnfedSegment((1,), 0),)), "is within a request"),
        (replace(VALUE, constraint=Constraint("g")), "is within a request"),
        (replace(VALUE, pending=None), "last token is missing"),
    ],
)
def test_session_without_a_whole_state_is_refused(value: SessionValue, message: str) -> None:
    with pytest.raises(ImportRefused, match=message):
        named_state(value)


def test_export_of_a_session_is_a_state() -> None:
    found = import_state(export_session(VALUE, IDENTITY, b"k" * 32), IDENTITY)
    assert found.digest == named_state(VALUE).digest


def test_state_is_no_session() -> None:
    """It is not signed, and an import takes nothing that is not."""
    with pytest.raises(ImportRefused):
        import_session(file_of(named_state(VALUE)), IDENTITY, b"k" * 32, trust_unsigned=True)


def test_session_that_began_with_a_state_is_exported_with_it() -> None:
    value = replace(tuned_state(block(0)).value, id="s", owner="ann", pending=4)
    found = import_session(export_session(value, IDENTITY, b"k" * 32), IDENTITY, b"k" * 32)
    assert found.origin == value.origin
    assert found.state is not None


def test_state_of_another_model_is_refused_with_both_names() -> None:
    other = replace(IDENTITY, model="model-2")
    with pytest.raises(SnapshotMismatch, match=r"the state .* another model: model-1, .* model-2"):
        import_state(file_of(named_state(VALUE)), other)


def test_every_flipped_byte_is_refused() -> None:
    file = file_of(named_state(VALUE, "Once"))
    for place in range(len(file)):
        broken = bytearray(file)
        broken[place] ^= 0x20
        with pytest.raises(ImportRefused):
            import_state(bytes(broken), IDENTITY)


@pytest.mark.parametrize("data", [b"", b"x" * 100, file_of(named_state(VALUE))[:-1][:60]])
def test_other_data_is_not_recognised(data: bytes) -> None:
    assert about_of(data) is None
    with pytest.raises(ImportRefused):
        import_state(data, IDENTITY)
