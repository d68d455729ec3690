"""Imports this checkout's code although the environment has another one installed as editable.

The finder of such an install comes before ``PYTHONPATH``, so tests of this checkout would run the
other one's code. Python runs this module at its start where this folder is in ``PYTHONPATH``:

    PYTHONPATH=$PWD:$PWD/tests/own_tree python -m benchmarks.decode
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(FOLDER))


def use_own_tree(
    finders: list[Any], path: list[str], environment: MutableMapping[str, str]
) -> None:
    """Takes out such finders, for this process and those that it starts."""
    foreign = [f for f in finders if ROOT not in getattr(f, "search_paths", [ROOT])]
    if foreign:
        finders[:] = [finder for finder in finders if finder not in foreign]
        path.insert(0, ROOT)
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, FOLDER, before)))


use_own_tree(sys.meta_path, sys.path, os.environ)
