"""RWKV-7 as BlinkDL and flash-linear-attention publish it, and its tuned states."""
