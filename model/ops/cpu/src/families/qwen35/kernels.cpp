// Compiled once per level; see kernels.cpp.
#include "families/qwen35/step.h"

EVERSTREAM_FAMILY_KERNELS(qwen35, Qwen35Model, Qwen35Step)
