"""Imports this checkout's code although the environment has another one installed as editable.

The finder of such an install comes before ``PYTHONPATH``, so tests of this checkout would run the
other one's code. Python runs this module at its start where this folder is in ``PYTHONPATH``:

    PYTHONPATH=$PWD:$PWD/tests/own_tree python -m benchmarks.decode
"""

from __future__ import annotations

import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(FOLDER))


def use_own_tree() -> None:
    """Takes out such finders, for this process and those that it starts."""
    foreign = [f for f in sys.meta_path if ROOT not in getattr(f, "search_paths", [ROOT])]
    if foreign:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in foreign]
        sys.path.insert(0, ROOT)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, FOLDER, before)))


use_own_tree()
