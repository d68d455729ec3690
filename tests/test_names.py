"""One thing for one word: no two public classes of the server have one name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def shared_names(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names of public classes that several places have, by (place, source)."""
    places: dict[str, list[str]] = defaultdict(list)
    for place, source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_public_classes_of_the_server_have_one_name() -> None:
    files = sorted((ROOT / "server").rglob("*.py"))
    assert files
    sources = [(str(path.relative_to(ROOT)), path.read_text("utf-8")) for path in files]
    assert shared_names(sources) == {}


def test_a_shared_name_is_seen() -> None:
    sources = [("a", "class Row: ...\nclass _Own: ..."), ("b", "if x:\n    class Row: ...")]
    sources.append(("c", "class _Own: ...\nclass Other: ..."))
    assert shared_names(sources) == {"Row": ["a", "b"]}


#: Names of several files of the server, and the one thing that they mean.
SAME = {
    "body": "what may come in the body of a request",
    "database": "a connection to the database of a store",
    "errors": "errors, and how the API says them",
    "events": "the events of a session on the wire",
    "prepare": "from a body to a request of the engine",
    "routes": "the routes of a part of an API",
    "server": "the process: its socket, and the routes about it",
    "sessions": "kept sessions",
    "store": "a store of kept sessions",
}


def test_files_of_the_server_with_one_name_mean_one_thing() -> None:
    stems: dict[str, int] = defaultdict(int)
    for path in (ROOT / "server").rglob("[!_]*.py"):
        stems[path.stem] += 1
    assert {stem for stem, count in stems.items() if count > 1} == SAME.keys()
