"""Tables inside a page of docs/, between comments that name them."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: What a page has around a table, by the table's name.
MARKS = "<!-- {0} -->\n", "<!-- end of {0} -->"


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """``page`` with these tables in place of those that it has."""
    for name, table in tables.items():
        begin, end = (mark.format(name) for mark in MARKS)
        found = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        assert found.search(page), name
        text = f"{begin}\n{table}\n\n{end}"
        page = found.sub(text.replace("\\", r"\\"), page)
    return page
