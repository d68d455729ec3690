from __future__ import annotations

import subprocess
import sys

import pytest

from model.memory import keep_freed_memory

CODE = """
import resource, sys, threading
import torch
from model.memory import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()

def faults_of_a_temporary():
    for _ in range(50):
        torch.zeros(4 << 20, dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        torch.ones(4 << 20, dtype=torch.uint8), torch.ones(40 << 20, dtype=torch.uint8)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=faults_of_a_temporary)
thread.start()
thread.join()
"""


def page_faults(mode: str) -> int:
    command = [sys.executable, "-c", CODE, mode]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.process
def test_freed_memory_is_used_again_without_page_faults() -> None:
    if not sys.platform.startswith("linux"):
        assert not keep_freed_memory()
        return
    assert page_faults("kept") < page_faults("default") / 3
