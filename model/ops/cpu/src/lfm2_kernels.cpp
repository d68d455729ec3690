// Compiled once per level; see kernels.cpp.
#include "lfm2_step.h"

EVERSTREAM_FAMILY_KERNELS(lfm2, Lfm2Model, Lfm2Step)
