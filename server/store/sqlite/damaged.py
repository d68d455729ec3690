"""What can still be read of a damaged database: row by row, from a copy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw

from server.store.sqlite.database import FILE_NAME

Row = dict[str, Any]

#: Numbers of rows that are asked for one by one between two that could be read.
MAX_GAP = 1 << 16


class Damaged:
    """The database of the store at ``path``; ``work`` is an empty folder for a copy of it.

    Raises `apsw.Error` where not even its schema can be read.
    """

    def __init__(self, path: Path, work: Path) -> None:
        copy = work / FILE_NAME
        for suffix in ("", "-wal"):
            if (path / f"{FILE_NAME}{suffix}").is_file():
                shutil.copyfile(path / f"{FILE_NAME}{suffix}", work / f"{FILE_NAME}{suffix}")
        _lengthen(copy)
        self._connection = apsw.Connection(str(copy))
        self._connection.execute("PRAGMA writable_schema = ON")  # a page count that is wrong
        tables = "SELECT name FROM sqlite_master WHERE type = 'table'"
        self.tables = {name for (name,) in self._connection.execute(tables)}

    def close(self) -> None:
        self._connection.close(True)

    def rows(self, table: str) -> list[Row]:
        """All that can be read, in their order."""
        if table not in self.tables:
            return []
        if table in ("meta", "request_key"):  # they have no numbers
            return [row for _, row in self._scan(f"SELECT 0, * FROM {table}")]  # noqa: S608
        query = f"SELECT rowid, * FROM {table} "  # noqa: S608
        found = dict(self._scan(query + "ORDER BY rowid"))
        found.update(self._scan(query + "ORDER BY rowid DESC"))
        for number in self._missing(table, found):
            found.update(self._scan(query + f"WHERE rowid = {number:d}"))
        return [found[number] for number in sorted(found)]

    def _missing(self, table: str, found: dict[int, Row]) -> Iterator[int]:
        numbers = sorted(found)
        last = self._last(table)
        if last is not None and (not numbers or numbers[-1] < last):
            numbers.append(last + 1)
        previous = 0
        for number in numbers:
            if number - previous <= MAX_GAP:
                yield from range(previous + 1, number)
            previous = number

    def _last(self, table: str) -> int | None:
        """The highest number that a session ever had; of others it is not known."""
        for _, row in self._scan("SELECT 0, * FROM sqlite_sequence"):
            if row["name"] == table:
                return int(row["seq"])
        return None

    def _scan(self, query: str) -> Iterator[tuple[int, Row]]:
        """Rows up to the first that cannot be read."""
        try:
            cursor = self._connection.execute(query)
            for number, *values in cursor:
                names = [column[0] for column in cursor.description[1:]]
                yield number, dict(zip(names, values, strict=True))
        except apsw.Error:
            return


def _lengthen(file: Path) -> None:
    """Pads the file with zeros up to the size in its header; SQLite refuses a shorter one."""
    with file.open("r+b") as database:
        header = database.read(100)
        page_size = int.from_bytes(header[16:18], "big")
        size = (65536 if page_size == 1 else page_size) * int.from_bytes(header[28:32], "big")
        if 0 < file.stat().st_size < size < 1 << 40:
            database.truncate(size)
