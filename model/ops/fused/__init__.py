"""Passes of a training step that the native extension does in one go, with their gradients.

Between the matrix products of a step there are element-wise operations, each of which
torch takes through memory on its own, forward and backward. Here each group of them has
a readable definition in torch and a kernel in ``model/ops/cpu/src/training/training.cpp``. The
kernel is used where a gradient is wanted, the tensors are on the CPU and the extension
is built (`kernels_for`); inference always runs the definition.

Activations go in and come out in the dtype of the products around them (bfloat16 under
autocast); inside a kernel everything is float32.
"""
