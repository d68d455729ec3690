// Compiled once per level; see kernels.cpp.
#include "families/block/step.h"

EVERSTREAM_FAMILY_KERNELS(block, BlockModel, BlockStep)
