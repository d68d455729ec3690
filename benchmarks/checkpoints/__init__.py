"""RWKV-7 files as published, compared with the other programs that run them.

Weights are random in the published shapes (`shapes`), on which speed and memory do not depend.
``python -m benchmarks.checkpoints`` measures tokens/s on the very same GGUF file as llama.cpp,
and on the same weights as the ``rwkv`` package.
"""
