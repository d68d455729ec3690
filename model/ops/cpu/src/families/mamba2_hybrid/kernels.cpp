// Compiled once per level; see kernels.cpp.
#include "families/mamba2_hybrid/step.h"

EVERSTREAM_FAMILY_KERNELS(mamba2_hybrid, Mamba2HybridModel, Mamba2HybridStep)
