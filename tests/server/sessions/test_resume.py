"""What a client reads of a cursor that has no place in the session's log."""

from __future__ import annotations

import pytest

from server.engine.types import SessionInfo
from server.sessions.loader import OTHER_STORE, REWOUND, Cursor, Page, resumed


@pytest.mark.parametrize(
    ("cursor", "reason"),
    [
        (Cursor(3, "store-1"), None),
        (Cursor(3), None),
        (Cursor(5, "store-1"), None),
        (Cursor(3, "store-0"), REWOUND),
        (Cursor(3, "before-the-restore-1"), OTHER_STORE),
        (Cursor(3, "anything"), OTHER_STORE),
        (Cursor(9, "store-1"), "the session has not had that many events"),
    ],
)
def test_reset_names_its_reason(cursor: Cursor, reason: str | None) -> None:
    info = SessionInfo("sess_1", 5, 5, False, 0.0, 0)
    assert resumed(info, cursor, "store-1", Page(3, ())).reset == reason


def test_stores_with_a_common_beginning_are_different_ones() -> None:
    info = SessionInfo("sess_1", 5, 5, False, 0.0, 0)
    assert resumed(info, Cursor(3, "a-b-1"), "a-c-1", Page(3, ())).reset == OTHER_STORE
