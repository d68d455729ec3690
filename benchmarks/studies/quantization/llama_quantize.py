"""Quantises a GGUF file with llama.cpp's own rounding, for the module of this folder.

    PYTHON benchmarks/studies/quantization/llama_quantize.py FILE OUT KIND

PYTHON needs the package `llama_cpp`, and nothing of Everstream. KIND is one of `KINDS`. There is no
importance matrix.
"""

from __future__ import annotations

import sys

import llama_cpp

KINDS = {
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}


def main(file: str, out: str, kind: str) -> None:
    """See the module's docstring."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = KINDS[kind], 1
    failed = llama_cpp.llama_model_quantize(file.encode(), out.encode(), parameters)
    if failed:
        sys.exit(f"llama.cpp did not quantise {file}: {failed}")


if __name__ == "__main__":
    main(*sys.argv[1:])
