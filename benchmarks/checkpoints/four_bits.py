"""GGUF files of four bits as llama.cpp makes them: a BF16 file through its own rounding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.process import ROOT, make_once

PROGRAM = ROOT / "benchmarks" / "studies" / "quantization" / "llama_quantize.py"
#: What llama.cpp calls them. Their heads, and in Q4_K_M other matrices too, have six bits.
KINDS = {"q4_0": "Q4_0", "q4_k_m": "Q4_K_M"}


def quantized(file: Path, kind: str) -> Path:
    """``file``, of BF16 as its name says, in one of `KINDS`; made where it is missing."""
    name = KINDS[kind]
    assert "BF16" in file.name, file

    def write(path: Path) -> None:
        command = [sys.executable, str(PROGRAM), str(file), str(path), name]
        subprocess.run(command, check=True)

    return make_once(file.with_name(file.name.replace("BF16", f"llama-{name}")), write)
