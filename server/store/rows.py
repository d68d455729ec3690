"""What the log, its tables and its snapshots want of a database: SQLite's or PostgreSQL's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Database(Protocol):
    """A connection. Statements have a question mark for each parameter."""

    @property
    def execute(self) -> Callable[..., Any]: ...
    def transaction(self, synced: bool = True) -> AbstractContextManager[None]: ...
    def savepoint(self) -> AbstractContextManager[None]: ...
    def set_meta(self, name: str, value: object) -> None: ...
