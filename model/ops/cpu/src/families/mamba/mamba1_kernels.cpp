// Compiled once per level; see kernels.cpp.
#include "families/mamba/mamba1_step.h"

EVERSTREAM_FAMILY_KERNELS(mamba, Mamba1Model, Mamba1Step)
