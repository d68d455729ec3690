// Compiled once per level; see kernels.cpp.
#include "block_step.h"

EVERSTREAM_FAMILY_KERNELS(block, BlockModel, BlockStep)
