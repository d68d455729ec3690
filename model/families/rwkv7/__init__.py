"""RWKV-7 as BlinkDL and flash-linear-attention publish it, its tuned states, and ARWKV-7."""
