"""Published files of RWKV-7, Qwen3.5, LFM2 and Mamba-2, compared with the programs that run them.

Weights are random in the published shapes (`shapes`, `hybrids`, `folders`), on which speed and
memory do not depend. ``python -m benchmarks.checkpoints`` measures tokens/s on the very same GGUF
file as llama.cpp, and of RWKV-7 on the same weights as the ``rwkv`` package.
"""
