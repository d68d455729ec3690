"""The native runtime: serves a model by the kernels of `model.ops.cpu`, without torch."""
