// Compiled once per level; see kernels.cpp.
#include "families/jamba/step.h"

EVERSTREAM_FAMILY_KERNELS(jamba, JambaModel, JambaStep)
