"""(6) A session of other weights, another tokenizer, dtype, backend or layout: a typed error."""

from __future__ import annotations

import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from server.engine.session import StateBlock
from server.store.base import Identity, SnapshotMismatch
from server.store.sqlite.store import open_store
from server.store.states import decode_state, encode_state, export_session, import_session
from tests.server.store.records import IDENTITY, Writer, block

#: All but a bound at which texts stop: see the last test.
NAMES = [field.name for field in fields(Identity) if field.name != "context"]


def another(name: str) -> Identity:
    """An identity that differs in one field."""
    here = getattr(IDENTITY, name)
    there: Any = here + 1 if isinstance(here, int) else here + "x"
    return replace(IDENTITY, **{name: there})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("state", [None, block(3)], ids=["empty", "forked"])
def test_store_of_another_identity_is_refused_by_name(
    tmp_path: Path, name: str, state: StateBlock | None
) -> None:
    """Also where there is no state yet: its tokens were drawn by another model."""
    store = open_store(tmp_path, IDENTITY)
    store.commit([Writer().opened(state, (1, 2, 3) if state else ())])
    store.close()
    other = open_store(tmp_path, another(name))
    with pytest.raises(SnapshotMismatch, match=name):
        other.load("s1", "ann")
    assert [each.id for each in other.list("ann", None, 9)] == ["s1"]
    other.close()
    again = open_store(tmp_path, IDENTITY)
    assert again.load("s1", "ann").value.id == "s1"
    again.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_crash_does_not_make_a_session_ours(tmp_path: Path, name: str) -> None:
    """What the journal alone has belongs to the one who wrote it, too."""
    store = open_store(tmp_path / "a", IDENTITY)
    store.commit([Writer().opened()])
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # as if the first one had died here
    other = open_store(tmp_path / "b", another(name))
    with pytest.raises(SnapshotMismatch, match=name):
        other.load("s1", "ann")
    other.close()
    store.close()


@pytest.mark.parametrize("name", NAMES)
def test_state_file_names_its_identity(name: str) -> None:
    file = b"".join(encode_state(block(3), another(name), 3))
    with pytest.raises(SnapshotMismatch, match=name):
        decode_state(file, IDENTITY, 3)


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_session_is_not_taken_by_another(name: str) -> None:
    writer = Writer()
    writer.opened(block(3), (1, 2, 3))
    file = export_session(writer.value, another(name), b"key")
    with pytest.raises(SnapshotMismatch, match=name):
        import_session(file, IDENTITY, b"key")


def test_a_bound_matters_only_where_the_past_slides() -> None:
    """Where texts stop there, a state is the same under any bound."""
    stopping, sliding = (replace(IDENTITY, past=past, context=64) for past in ("stop", "slide"))
    file = b"".join(encode_state(block(3), stopping, 3))
    assert decode_state(file, replace(stopping, context=128), 3).data == block(3).data
    file = b"".join(encode_state(block(3), sliding, 3))
    with pytest.raises(SnapshotMismatch, match=r"another context: 64, .* has 128"):
        decode_state(file, replace(sliding, context=128), 3)
