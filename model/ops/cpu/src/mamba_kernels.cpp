// Compiled once per level; see kernels.cpp.
#include "mamba_step.h"

EVERSTREAM_FAMILY_KERNELS(mamba, MambaModel, MambaStep)
