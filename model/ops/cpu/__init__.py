"""The kernels in C++ for CPUs, an extension module: for the native runtime and for training."""
