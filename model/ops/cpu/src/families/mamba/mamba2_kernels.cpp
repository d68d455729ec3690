// Compiled once per level; see kernels.cpp.
#include "families/mamba/mamba2_step.h"

EVERSTREAM_FAMILY_KERNELS(mamba2, Mamba2Model, Mamba2Step)
