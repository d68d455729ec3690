// Compiled once per level; see kernels.cpp.
#include "rwkv7_step.h"

EVERSTREAM_FAMILY_KERNELS(rwkv7, Rwkv7Model, Rwkv7Step)
