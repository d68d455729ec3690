"""Runs numerical tests as other processors would: their libraries' code for older instructions.

    python -m tests.processors [PYTEST OPTIONS]

runs `LONG` once in each of `ENVIRONMENTS`. `tests/test_processors.py` runs `SHORT`. The
levels of the native runtime need no environment: its tests take each of them in turn.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]

#: ATen takes what it is told, also what the processor lacks; the other two only ever take less.
ENVIRONMENTS: dict[str, Mapping[str, str]] = {
    "sse": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
    "compatible": {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX"},
}
if torch.cpu._is_avx2_supported():
    ENVIRONMENTS["avx2"] = {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }
if torch.cpu._is_avx512_supported():
    ENVIRONMENTS["avx512"] = {
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    }

SHORT = (
    "tests/server/engine/test_invariance.py::test_rows_have_the_same_bits_in_all_sizes",
    "tests/server/engine/test_same_bits.py::test_same_state_bits_alone_or_among_others",
    "tests/server/engine/test_sampler.py::test_company_changes_no_bit",
    "tests/model/test_lm.py::test_three_forms_agree",
)
LONG = (
    "tests/model/attention",
    "tests/model/ops/cpu",
    "tests/model/test_lm.py",
    "tests/model/test_ops.py",
    "tests/model/test_random_features.py",
    "tests/model/quantization",
    "tests/server/engine",
    "tests/server/test_every_mechanism.py",
    "tests/reliability/test_bit_table.py",
)


def run(environment: Mapping[str, str], tests: Sequence[str], *options: str) -> int:
    """The exit status of pytest for ``tests`` in a process with these variables."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *tests]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, check=False
    ).returncode


def main() -> int:
    """Runs all of them, also after one has failed."""
    failed = []
    for name, environment in ENVIRONMENTS.items():
        print(f"== {name}: {environment}", flush=True)
        if run(environment, LONG, *sys.argv[1:]):
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
