"""What a process uses of the machine, and what the machine is. Reads Linux's `/proc`."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used, over all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def thread_seconds(pid: int) -> dict[int, float]:
    """User and system time of each thread, to the nanosecond."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return {int(file.parent.name): int(file.read_text().split()[0]) / 1e9 for file in files}


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, exactly; `statm` counts in batches per CPU."""
    return _bytes_of(Path(f"/proc/{pid}/smaps_rollup"), "Rss")


def peak_bytes(pid: int) -> int:
    """The largest resident memory that a process has had."""
    return _bytes_of(Path(f"/proc/{pid}/status"), "VmHWM")


def available_bytes() -> int:
    """Memory that new work can have without swapping."""
    return _bytes_of(Path("/proc/meminfo"), "MemAvailable")


def num_descriptors(pid: int) -> int:
    """Open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": found[1] if found else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_at_start": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _bytes_of(file: Path, name: str) -> int:
    """The value of a line of ``file`` in kB."""
    found = re.search(rf"^{name}:\s+(\d+) kB", file.read_text(), re.MULTILINE)
    assert found is not None, (file, name)
    return int(found[1]) * 1024
