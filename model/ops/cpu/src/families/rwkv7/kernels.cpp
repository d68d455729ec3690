// Compiled once per level; see kernels.cpp.
#include "families/rwkv7/step.h"

EVERSTREAM_FAMILY_KERNELS(rwkv7, Rwkv7Model, Rwkv7Step)
