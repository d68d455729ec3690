"""Settings of every test, made before torch is imported."""

from __future__ import annotations

import os

# Tiny models gain nothing from a second thread and lose much beside another busy process.
# Child processes inherit it; tests about threads set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
