"""ARWKV (RWKV7Qwen2): RWKV-7's time mix in the blocks of Qwen2.

Yueyu et al. 2025, "ARWKV: Pretrain is not what we need, an RNN-Attention-Based Language Model Born
from Transformer", arXiv 2501.15570.
"""
