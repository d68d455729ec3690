"""Sessions as signed files: what goes out comes in, and nothing else does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from server.engine.session import Constraint, SessionValue, StateBlock, UnfedSegment
from server.store.base import ImportRefused, SnapshotMismatch
from server.store.sqlite.database import signing_key
from server.store.states import MAX_ABOUT_BYTES, export_session, import_session, unpack
from tests.server.store.records import IDENTITY, STATE_BYTES, Writer, block

KEY = b"k" * 32


def exported(**changes: object) -> tuple[SessionValue, bytes]:
    """A session in the middle of a request, and its file."""
    writer = Writer()
    writer.opened(block(3), (1, 2, 3))
    writer.accepted()
    value = replace(
        writer.value,
        position=3,
        unfed=(UnfedSegment((7, 8), 5), UnfedSegment((9,), 0)),
        pending=4,
        undecoded=b"\xc3",
        recent=(1, 2, 3),
        constraint=Constraint("a grammar", (9, 4)),
    )
    value = replace(value, **changes)  # type: ignore[arg-type]
    return value, export_session(value, IDENTITY, KEY)


def same(one: SessionValue, other: SessionValue) -> bool:
    return replace(one, state=None) == replace(other, state=None) and (
        None if one.state is None else bytes(one.state.data)
    ) == (None if other.state is None else bytes(other.state.data))


def test_session_round_trips_without_its_request() -> None:
    value, file = exported()
    assert value.progress is not None
    assert same(import_session(file, IDENTITY, KEY), replace(value, progress=None))


def test_an_empty_session_has_no_state() -> None:
    value, file = exported(position=0, state=None)
    assert same(import_session(file, IDENTITY, KEY), replace(value, progress=None))


def test_is_a_safetensors_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(exported()[1])
    with safe_open(tmp_path / "file", "numpy") as file:
        assert file.get_tensor("state").tobytes() == bytes(block(3).data)
        assert file.metadata()["model"] == IDENTITY.model


def test_every_flipped_byte_is_refused() -> None:
    _, file = exported()
    for place in range(len(file)):
        for flip in (1, 0x20, 0xFF):
            broken = bytearray(file)
            broken[place] ^= flip
            with pytest.raises(ImportRefused):
                import_session(bytes(broken), IDENTITY, KEY)
            if b"signature" not in file[place - 80 : place + 12]:
                with pytest.raises(ImportRefused):
                    import_session(bytes(broken), IDENTITY, KEY, trust_unsigned=True)


@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ImportRefused):
        import_session(data, IDENTITY, KEY, trust_unsigned=True)


def test_another_key_must_be_trusted() -> None:
    value, file = exported(constraint=None)
    with pytest.raises(ImportRefused, match="signed"):
        import_session(file, IDENTITY, b"another key")
    trusted = import_session(file, IDENTITY, b"another key", trust_unsigned=True)
    assert trusted.position == value.position


def test_unsigned_grammar_is_refused() -> None:
    value, file = exported()
    assert import_session(file, IDENTITY, KEY, trust_unsigned=True).constraint == value.constraint
    with pytest.raises(ImportRefused, match="under a grammar"):
        import_session(file, IDENTITY, b"another key", trust_unsigned=True)


def test_a_file_that_is_too_large_is_not_read() -> None:
    with pytest.raises(ImportRefused, match="too large"):
        import_session(bytes(STATE_BYTES + MAX_ABOUT_BYTES + 1), IDENTITY, KEY)


@pytest.mark.parametrize(
    "changes",
    [
        {"position": 0},
        {"state": None},
        {"position": -1},
        {"seq": -1},
        {"pending": -1},
        {"pending": None},
        {"recent": (1, -5)},
        {"unfed": (UnfedSegment((), 0),)},
        {"unfed": (UnfedSegment((1, 2, 3), 2),)},
        {"undecoded": b"x" * 100},
        {"constraint": Constraint("a grammar", (9, -4))},
        {"constraint": Constraint("a grammar", (9,) * 8)},
        {"state": StateBlock(block(3).data[:-1])},
    ],
)
def test_a_session_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    _, file = exported(**changes)
    with pytest.raises(ImportRefused):
        import_session(file, IDENTITY, KEY)


def test_file_of_a_release_without_state_dtypes_has_float32() -> None:
    value, file = exported()
    about, _ = unpack(file)
    assert "state_dtype" not in about
    assert import_session(file, IDENTITY, KEY).position == value.position
    with pytest.raises(SnapshotMismatch, match="another state_dtype: float32, and this server has"):
        import_session(file, replace(IDENTITY, state_dtype="bfloat16"), KEY)


def test_request_ids_are_not_exported() -> None:
    _, file = exported()
    about, _ = unpack(file)
    assert '"progress":null' in about["value"]
    assert b"r1" not in file


def test_the_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    key = signing_key(tmp_path)
    assert len(key) == 32
    assert signing_key(tmp_path) == key
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
