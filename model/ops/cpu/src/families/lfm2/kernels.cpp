// Compiled once per level; see kernels.cpp.
#include "families/lfm2/step.h"

EVERSTREAM_FAMILY_KERNELS(lfm2, Lfm2Model, Lfm2Step)
